"""The configuration tree: one dataclass per TOML section.

Sections and keys that torchtitan 0.2 also has keep its names and meaning. The docstring under a field is
its help text; it states the unit where there is one.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Job:
    config_file: str | None = None
    """TOML file to read; keys given on the command line beat it."""
    dump_folder: str = "./outputs"
    """Folder for checkpoints, metrics, traces and caches."""
    description: str = ""
    """Free text, printed at the start of the run."""
    print_config: bool = False
    """Print the resolved configuration before training."""


@dataclass
class Model:
    name: str = "qwen3_moe"
    """Model family: deepseek_v3, kimi_k2, qwen2_moe, qwen3_moe, mixtral, gpt_oss, glm4_moe, minimax_m2."""
    flavor: str = "debug"
    """Size within the family, for example debug or 30b_a3b."""
    tokenizer: str = "bytes"
    """'bytes', or the path of a tokenizer.json (or of a folder that holds one)."""
    override: dict[str, Any] = field(default_factory=dict)
    """Any field of the family's model config, for example num_experts = 16."""


@dataclass
class Optimizer:
    name: Literal["AdamW", "Muon"] = "AdamW"
    """'Muon' updates matrices, except embeddings and the head, by Muon and the rest by AdamW."""
    lr: float = 8e-4
    """Peak learning rate, per optimizer step."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the update runs; the same maths."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """[[optimizer.groups]] tables: pattern (a parameter's name; * within one part, ** any parts), and of optimizer, lr,
    weight_decay and row_blocks what differs. The first pattern that matches a parameter counts."""
    exp_avg_dtype: Literal["float32", "bfloat16", "float16", "float8"] | None = None
    """How AdamW's first moment and Muon's momentum are stored; None: in the precision of the update, at least float32.
    float16 and float8 come with a scale for every 32 elements."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16", "float8"] | None = None
    """How AdamW's second moment is stored."""
    master_dtype: Literal["float32", "float16"] | None = None
    """With training.dtype bfloat16: a copy of the parameters in this dtype, on which updates work; None: none."""
    store_param_remainders: bool = False
    """With training.dtype bfloat16: keep the 16 bits by which a parameter differs from its float32 master. As exact as
    master_dtype float32, in 2 bytes instead of 4."""
    main_grad_dtype: Literal["float32", "bfloat16"] | None = None
    """How gradients are kept until the step; None: in the parameters' dtype. Sums over micro-batches would lose too
    much in fewer bits."""
    stochastic_rounding: bool = False
    """Round what is stored in less than float32 up or down by chance instead of to nearest."""
    offload_fraction: float = 0.0
    """Share of the optimizer's state, in bytes, that is in host memory between steps."""
    offload_bucket_mb: int = 256
    """State that is moved at once, in MiB; two such buckets are on the device during a step."""
    cpu_step_fraction: float = 0.0
    """Share of AdamW's state that stays in host memory, where its parameters are updated."""
    muon_momentum: float = 0.95
    """Decay of Muon's momentum."""
    muon_nesterov: bool = True
    """Muon's update looks one step ahead."""
    muon_ns_steps: int = 5
    """Newton-Schulz iterations."""
    muon_scale: Literal["match_rms", "spectral"] = "match_rms"
    """Size of Muon's update: 'match_rms' as large as AdamW's, so that both share lr; 'spectral' sqrt(max(1, rows /
    columns))."""
    qk_clip_threshold: float | None = None
    """Scale a head's query and key weights after a step in which its largest attention logit was beyond this; with
    Muon this is MuonClip. Costs queries times keys once more."""


@dataclass
class LRScheduler:
    warmup_steps: int = 200
    """Linear warm-up, in steps; capped at training.steps."""
    decay_ratio: float | None = None
    """Share of training.steps spent decaying; by default all steps after the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay. With decay_ratio set this is the warm-up-stable-decay (wsd) schedule."""
    min_lr_factor: float = 0.0
    """Last learning rate as a share of the peak."""


@dataclass
class Training:
    dataset: str = "stdlib"
    """'stdlib', 'text', 'jsonl', 'parquet' or 'huggingface'."""
    dataset_path: str | None = None
    """File or folder of the dataset; not used by stdlib."""
    local_batch_size: int = 8
    """Sequences per process and forward pass; -1: global_batch_size shared among the processes."""
    global_batch_size: int = -1
    """Sequences per optimizer step, over all processes and accumulation; -1: no accumulation."""
    seq_len: int = 2048
    """Tokens per sequence."""
    document_mask: bool = True
    """Keep packed documents apart: no attention, loss or MTP label crosses a boundary."""
    skip_bad_records: bool = False
    """Skip and count broken records instead of stopping at the first."""
    num_workers: int = 1
    """Loader processes per training process; 0 loads in the training process."""
    max_norm: float = 1.0
    """Gradient clipping norm; 0 or less switches clipping off."""
    steps: int = 1000
    """Optimizer steps."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of the parameters, and of compute unless mixed_precision_param says otherwise. float16: float32
    parameters, float16 compute with loss scaling."""
    mixed_precision_param: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Compute dtype; parameters stay in training.dtype. float16 comes with loss scaling."""
    skip_nonfinite: int = 0
    """Steps with a loss or gradient that is not finite to skip in a row before stopping."""
    gc_freq: int = 50
    """Steps between Python garbage collections; collection is off in between."""
    seed: int = 0
    """Seed of the initial weights, the data order and jitter."""


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Replicas of the sharded model (HSDP)."""
    data_parallel_shard_degree: int = -1
    """Processes that share one copy of the parameters (FSDP2); -1: the rest."""
    tensor_parallel_degree: int = 1
    """Processes that share each dense matrix."""
    context_parallel_degree: int = 1
    """Processes that share each sequence."""
    pipeline_parallel_degree: int = 1
    """Processes that hold different layers."""
    expert_parallel_degree: int = 1
    """Processes that hold different experts; folds over tp, cp and dp."""
    expert_tensor_parallel_degree: int = 1
    """Processes that share each expert's matrices."""
    enable_sequence_parallel: bool = True
    """With tensor parallelism, keep the residual stream sharded over the sequence."""
    context_parallel_method: Literal["allgather", "alltoall"] = "allgather"
    """'allgather' gathers keys and values; 'alltoall' exchanges sequence shards for heads."""
    pipeline_parallel_schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""
    pipeline_parallel_layout: str | None = None
    """Layers of each stage, such as 'Et*3|(tt|)*29m|L'; by default spread evenly."""
    pipeline_parallel_microbatch_size: int = 1
    """Sequences per micro-batch of the pipeline."""
    virtual_pipeline_degree: int = 1
    """Pipeline stages per process."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward pass; 'default': always, except under pipeline parallelism."""


@dataclass
class Moe:
    dispatcher: Literal["local", "allgather", "alltoall", "deepep", "hybridep"] | None = None
    """How tokens reach their experts; by default local, or alltoall with expert parallelism."""
    recv_capacity_factor: float | None = None
    """With expert parallelism: rows that a rank has room for (alltoall: from each other rank), over those of even
    routing. Nothing then waits for the host; a step that needs more room runs again without the bound."""
    experts: Literal["grouped", "sequential"] = "grouped"
    """'grouped': all experts in one grouped product; 'sequential': a loop, the slow oracle."""
    save: Literal["preact", "input", "preact_fp8"] = "preact"
    """What grouped experts keep beside their input for backward: 'preact' the pre-activation; 'input' nothing, their
    first linear runs again; 'preact_fp8' the pre-activation in FP8, within 2^-4 of each value."""
    force_balance: bool = False
    """Route round-robin whatever the scores: for benchmarks only."""
    aux_loss_coef: float | None = None
    """Load-balancing loss per micro-batch. This key and those below: None keeps the model's own value."""
    seq_aux_loss_coef: float | None = None
    """Load-balancing loss per sequence."""
    global_aux_loss_coef: float | None = None
    """Load-balancing loss over the whole step so far."""
    z_loss_coef: float | None = None
    """Loss on the mean squared logsumexp of the router's logits."""
    bias_update_speed: float | None = None
    """Step of the expert bias per optimizer step (balance without a loss)."""
    capacity_factor: float | None = None
    """An expert takes at most this many times its even share of tokens; the rest is dropped."""
    drop_policy: Literal["probs", "position"] | None = None
    """Tokens that stay within the capacity: the highest weights, or the first ones."""
    pad_to_capacity: bool | None = None
    """Fill every expert to its capacity, so that shapes are static."""
    pad_counts_to: int | None = None
    """Round each expert's tokens up to a multiple of this many (16 for fp8, 32 for mxfp8)."""
    jitter: float | None = None
    """Router input noise in training: factors drawn from [1 - jitter, 1 + jitter]."""


@dataclass
class Kernels:
    backend: Literal["auto", "torch", "triton"] = "auto"
    """Kernels of the MoE layer. 'auto': Triton on CUDA, torch elsewhere."""


@dataclass
class Checkpoint:
    enable: bool = False
    """Save checkpoints, and resume from the newest complete one."""
    folder: str = "checkpoint"
    """Folder under job.dump_folder."""
    interval: int = 500
    """Steps between checkpoints."""
    keep_latest_k: int = 10
    """Complete checkpoints to keep; 0 keeps all."""
    async_mode: Literal["disabled", "async", "process", "async_with_pinned_mem"] = "disabled"
    """'async' and 'process' copy to host memory, go on training, and write from a thread or from another process.
    'async_with_pinned_mem' is torchtitan's name for 'process'."""
    max_steps_ahead: int = 0
    """With an async_mode: steps that training may go on while a checkpoint is being written, before it waits. A killed
    run then loses at most interval + max_steps_ahead steps. 0: up to the next checkpoint."""
    timeout_seconds: int = 1800
    """With an async_mode: how long a process waits for the slowest one to write its part, in seconds."""
    strict: bool = True
    """Stop at the step that follows a checkpoint that could not be written; false: say so and go on."""
    load_step: int = -1
    """Step to load; -1: the newest complete one."""
    load_only: Literal["model"] | None = None
    """'model': start anew, at step 0, with the weights of the checkpoint that would be resumed."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """What to start anew: optimizer, lr_scheduler, dataloader, train_state (step, tokens, loss scale), rng; or shell
    patterns of the model's tensors, such as 'model.lm_head.*', which with their moments need not fit then."""
    initial_load_path: str | None = None
    """Checkpoint or Hugging Face folder to start from when the folder holds no checkpoint."""
    initial_load_in_hf: bool = False
    """initial_load_path is in Hugging Face format: weights only."""
    last_save_in_hf: bool = False
    """Also write the final weights in Hugging Face format, to the folder hf under job.dump_folder."""
    export_dtype: Literal["float64", "float32", "bfloat16", "float16", "fp8", "source"] | None = None
    """Dtype of last_save_in_hf, by default training.dtype; router and expert bias stay float32 at least. 'fp8': linears
    in 128 x 128 blocks; 'source': each tensor's own in initial_load_path."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective", "targets"] = "none"
    """What runs again in the backward pass instead of being kept: 'full' each decoder layer, 'selective' each decoder
    layer but for the results of costly operators, 'targets' the parts that targets names."""
    targets: list[str] = field(default_factory=list)
    """Parts of layers: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, qk_norm, shared_expert, or patterns of
    module names such as '**.o_proj'. docs/memory.md has the bytes and the cost of each."""


@dataclass
class ActivationOffload:
    targets: list[str] = field(default_factory=list)
    """What waits on the host for its backward pass: saved tensors of attn, attn_norm, attn_proj, core_attn,
    expert_fc1, mlp, mlp_norm, moe, moe_act, qkv, shared_expert, or of modules by patterns such as '**.o_proj'."""
    fraction: float = 1.0
    """Share of the bytes of each target that travels."""
    min_bytes: int = 1048576
    """Smaller tensors stay on the device, in bytes."""


@dataclass
class Compile:
    enable: bool = False
    """Compile each decoder layer with torch.compile."""


@dataclass
class Validation:
    enable: bool = False
    """Evaluate on held-out text."""
    dataset: str | None = None
    """Dataset kind; by default training.dataset, split by a hash of each document's path."""
    dataset_path: str | None = None
    """File or folder; by default training.dataset_path."""
    fraction: float = 0.05
    """Share of the documents held out when training and validation share a dataset."""
    freq: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    steps: int = 16
    """Batches of the training's local_batch_size x processes per evaluation; -1: all."""


@dataclass
class Metrics:
    log_freq: int = 10
    """Steps between console lines; metrics.jsonl has every step."""
    enable_tensorboard: bool = True
    """Write TensorBoard event files."""
    save_tb_folder: str = "tb"
    """Folder under job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (needs the wandb package)."""
    disable_color_printing: bool = False
    """Plain console text."""


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Write Chrome traces with torch.profiler."""
    save_traces_folder: str = "profile_traces"
    """Folder under job.dump_folder."""
    profile_freq: int = 10
    """Steps between traces; the last step of each cycle is recorded."""
    enable_memory_snapshot: bool = False
    """Write CUDA memory snapshots; needs a GPU."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder under job.dump_folder."""


@dataclass
class Comm:
    init_timeout_seconds: int = 300
    """Timeout of the first collectives, in seconds."""
    train_timeout_seconds: int = 100
    """Timeout of collectives once the first step is done, in seconds."""


@dataclass
class Debug:
    seed: int | None = None
    """torchtitan's name for training.seed; beats it when set."""
    deterministic: bool = False
    """Use deterministic algorithms only."""
    traceback: bool = False
    """Show the traceback of errors that are reported in one line."""


@dataclass
class Plugins:
    use: list[str] = field(default_factory=list)
    """Plugins to apply, in this order."""


@dataclass
class JobConfig:
    """The whole configuration of a run."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    moe: Moe = field(default_factory=Moe)
    kernels: Kernels = field(default_factory=Kernels)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    activation_offload: ActivationOffload = field(default_factory=ActivationOffload)
    compile: Compile = field(default_factory=Compile)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    plugins: Plugins = field(default_factory=Plugins)
