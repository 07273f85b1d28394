"""What is planned: a run's configuration, checked as the trainer checks it, with the options that only a plan has."""

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from titan_moe.config import JobConfig, resolved_dtypes
from titan_moe.config.degrees import reshard_after_forward
from titan_moe.errors import ConfigError, nearest
from titan_moe.models import FAMILIES, ModelConfig
from titan_moe.models.count import Shape, mtp_is_dense, shape_of
from titan_moe.parallelize.check import check_run
from titan_moe.parallelize.layout import Stage
from titan_moe.parallelize.stages import pipeline_stages
from titan_moe.planner.activations import layer_rows
from titan_moe.planner.storage import Stored, size_of, stored_bytes
from titan_moe.planner.systems import System

Precision = Literal["bf16", "fp8_block", "mxfp8", "nvfp4"]
RECOMPUTE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "full")
"""Targets of report section 4.1.4; ``full`` is the whole layer."""
OFFLOAD = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "optimizer")
"""Targets of report sections 4.1.5 and 4.1.6."""
OWN_RECOMPUTE = "core_attn layernorm mla_up_proj mlp moe moe_act qk_norm shared_expert full".split()
"""Those of the trainer's ``activation_checkpoint``; see docs/memory.md."""
OWN_OFFLOAD = "attn attn_norm attn_proj core_attn expert_fc1 mlp mlp_norm moe moe_act qkv shared_expert".split()
"""Those of its ``activation_offload``."""
# The depths that were published with the weights; a config leaves them out unless asked.
PUBLISHED_MTP = {
    "deepseek_v3_671b": {"mtp_depth": 1},
    "glm4_moe_355b_a32b": {"mtp_depth": 1, "mtp_own_embeddings": True},
}


@dataclass
class Options:
    """What a plan has beside a run's configuration."""

    precision: Precision = "bf16"
    """Format of the linear layers' products and of their saved inputs."""
    recompute: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)
    dispatcher: Literal["alltoall", "deepep", "hybridep", "allgather"] = "alltoall"
    ep_overlap: bool = False
    """Hide the all-to-all behind another micro-batch's compute (report section 4.2.3)."""
    cuda_graph: bool = False
    """Capture attention, router and preprocessing (section 4.3.6)."""
    memory_efficient_permutation: bool = False
    """Routing weights in the activation (section 4.1.2). The report's Table 3 is without; this project's own experts
    are always so."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Format of the optimizer's moments (section 4.1.6)."""
    imbalance: float = 1.0
    """Rows of the busiest rank over the mean."""
    causal: bool = True
    lengths: list[int] = field(default_factory=list)
    """Tokens of packed documents that do not see each other; empty: one document per sequence."""
    rank_rule: Literal["worst", "report"] = "worst"
    engine: Literal["megatron", "titan"] = "megatron"
    """Whose kernels: fused ones as in the report, for which the constants hold, or this project's own modules."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where this project's own modules run; their attention keeps more on a CPU."""

    def __post_init__(self) -> None:
        own = self.engine == "titan"
        for name, key, legal in (
            ("recompute", "activation_checkpoint.targets", OWN_RECOMPUTE if own else RECOMPUTE),
            ("offload", "activation_offload.targets", OWN_OFFLOAD if own else OFFLOAD),
        ):
            for target in getattr(self, name):
                if target not in legal:
                    key = key if own else f"--{name}"
                    raise ConfigError(f"{key}: {target!r}: unknown target.{nearest(target, legal)}")
        if not 1 <= self.imbalance < 1000:
            raise ConfigError(f"--imbalance {self.imbalance}: must be at least 1, which is perfect balance.")
        if any(length < 1 for length in self.lengths):
            raise ConfigError(f"--lengths {self.lengths}: every document needs at least 1 token.")


@dataclass
class Run:
    """A run in the numbers that the formulas read; everything is per step, rank or micro-batch as named."""

    gpus: int
    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    dp: int
    edp: int
    mbs: int
    """Sequences of a micro-batch."""
    gbs: int
    seq: int
    count: int
    """Micro-batches of one pass through the pipeline."""
    passes: int
    """Passes through the pipeline in a step."""
    schedule: str
    stages: list[Stage]
    precision: str
    recompute: list[str]
    offload: list[str]
    dispatcher: str
    ep_overlap: bool
    cuda_graph: bool
    memory_efficient_permutation: bool
    state_bytes: float
    """Of the optimizer, on average for one parameter; the master counts unless it is the parameter itself."""
    state_away: float
    """Of those, on the host between steps."""
    stored: dict[str, list[float]]
    """This project's own runs: bytes of parameter, gradient and state on the device, by name; see ``storage``."""
    dense_share: int
    """Ranks that divide the optimizer's state of dense parameters among them."""
    expert_share: int
    imbalance: float
    causal: bool
    lengths: list[int]
    rank_rule: str
    engine: str
    device: str
    reshard: bool
    """FSDP frees gathered parameters between passes."""
    parameter_bytes: float
    compute_bytes: float
    sequence_parallel: bool
    cp_method: str
    offload_fraction: float
    """Share of the bytes of each target that travels."""
    offload_least: float
    """Bytes of the smallest tensor that does."""
    moe_save: str
    """What the experts keep of their pre-activation: ``preact``, ``input`` (nothing), ``preact_fp8``."""
    recv_capacity_factor: float
    """Rows that a rank has room for over those of even routing; 0: as many as come."""
    document_mask: bool
    """The attention gets a mask of documents (this project's own modules only)."""
    exact: bool = False
    """Simulate every operation, however many."""


def flavors() -> dict[str, tuple[str, str]]:
    """Every model as ``family_flavor``, with the two parts."""
    return {f"{family}_{flavor}": (family, flavor) for family in FAMILIES for flavor in FAMILIES[family].flavors}


def family_of(model: str) -> tuple[str, str]:
    """Family and flavor of ``model``, such as ``deepseek_v3_671b``.

    Raises:
        ConfigError: there is no such model.
    """
    known = flavors()
    if model not in known:
        raise ConfigError(f"--model {model!r}: unknown model.{nearest(model, known)}")
    return known[model]


def plan_of(config: JobConfig, gpus: int, options: Options, system: System) -> tuple[Shape, Run]:
    """The numbers of a run, after every check that the trainer makes of its layout, batch and model.

    Raises:
        ConfigError: what the trainer would refuse, in its words, or an option that the system cannot do.
    """
    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}: must be at least 1.")
    parallelism, training = config.parallelism, config.training
    model, degrees, batch = check_run(config, gpus)
    dp = degrees.dp_replicate * degrees.dp_shard
    _check_precision(options, system)
    if options.engine == "megatron":
        _check_recompute(options, model)
    bound = config.moe.recv_capacity_factor
    if bound is not None and options.imbalance > bound:
        raise ConfigError(
            f"--imbalance {options.imbalance} is beyond moe.recv_capacity_factor = {bound}: every step would run "
            "twice. Raise the bound, or leave it out."
        )
    mbs = parallelism.pipeline_parallel_microbatch_size if degrees.pp > 1 else batch.local
    titan = options.engine == "titan"
    dtype, compute = resolved_dtypes(config)
    shape = shape_of(model)
    stored = stored_bytes(config, model, shape) if titan else Stored({}, {"fp32": 12, "bf16": 8}[options.moments], 0)
    run = Run(
        gpus=gpus,
        tp=degrees.tp,
        cp=degrees.cp,
        pp=degrees.pp,
        vpp=parallelism.virtual_pipeline_degree,
        ep=degrees.ep,
        etp=degrees.etp,
        dp=dp,
        edp=degrees.edp_replicate * degrees.edp_shard,
        mbs=mbs,
        gbs=batch.total,
        seq=training.seq_len,
        count=batch.local // mbs if degrees.pp > 1 else batch.passes,
        passes=batch.passes if degrees.pp > 1 else 1,
        schedule=parallelism.pipeline_parallel_schedule,
        stages=pipeline_stages(parallelism, model),
        state_bytes=stored.state,
        state_away=stored.away if titan or "optimizer" not in options.offload else stored.state,
        stored=stored.by_name,
        dense_share=degrees.dp_shard * degrees.cp if titan else dp * degrees.cp,
        expert_share=degrees.edp_shard if titan else degrees.edp_replicate * degrees.edp_shard,
        reshard=titan and reshard_after_forward(parallelism),
        parameter_bytes=size_of(dtype) if titan else 4,
        compute_bytes=size_of(compute) if titan else 2,
        sequence_parallel=parallelism.enable_sequence_parallel,
        cp_method=parallelism.context_parallel_method,
        offload_fraction=config.activation_offload.fraction if titan else 1,
        offload_least=config.activation_offload.min_bytes if titan else 0,
        moe_save=config.moe.save,
        recv_capacity_factor=config.moe.recv_capacity_factor or 0,
        document_mask=titan and training.document_mask,
        **{f.name: getattr(options, f.name) for f in fields(Options) if f.name != "moments"},
    )
    if titan:
        _check_own_targets(shape, run)
    return shape, run


def _check_precision(options: Options, system: System) -> None:
    peaks = {"bf16": system.peak_bf16, "fp8_block": system.peak_fp8, "mxfp8": system.peak_fp8, "nvfp4": system.peak_fp4}
    if not peaks[options.precision]:
        legal = ", ".join(name for name, peak in peaks.items() if peak)
        raise ConfigError(f"--precision {options.precision}: {system.name} has no such products. Legal: {legal}.")


def _check_recompute(options: Options, model: ModelConfig) -> None:
    if "mla_up_proj" in options.recompute and not model.attention(0).latent:
        raise ConfigError(f"--recompute mla_up_proj: {model.family} has no latent attention. Leave it out.")
    if "mlp" in options.recompute and not model.num_dense_layers:
        raise ConfigError(f"--recompute mlp: {model.family} has no dense feed-forward. Leave it out; 'moe' is the MoE.")


def _check_own_targets(shape: Shape, run: Run) -> None:
    kinds = [dense for dense in (True, False) if _has_layers(shape, dense)]
    for key, name in (("activation_checkpoint", "recompute"), ("activation_offload", "offload")):
        for target in getattr(run, name):
            # Whatever the layout leaves of it.
            alone = replace(run, cp_method="allgather", **{"recompute": [], "offload": [], name: [target]})
            rows = [row for dense in kinds for row in layer_rows(shape, alone, dense)]
            if target != "full" and all(row[name] != target for row in rows):
                raise ConfigError(
                    f"{key}.targets: {target!r} matched nothing in the model. Take it out, or name parts that it has."
                )


def _has_layers(s: Shape, dense: bool) -> bool:
    if dense:
        return s.num_dense > 0
    return s.num_dense < s.num_layers or (s.mtp > 0 and not mtp_is_dense(s))
