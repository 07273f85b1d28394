"""Every rule that a configuration must keep, and the values derived from several keys at once."""

import importlib.util
import math
import os
import tempfile
from dataclasses import fields
from typing import Any, NamedTuple

from titan_moe.config.degrees import resolve_degrees
from titan_moe.config.groups import group_rules
from titan_moe.config.job import JobConfig
from titan_moe.errors import ConfigError, nearest

DATASETS = ("stdlib", "text", "jsonl", "parquet", "huggingface")
LOADABLE = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng")
"""What checkpoint.exclude_from_loading can name besides the model's tensors."""

_AT_LEAST = {
    "activation_offload.min_bytes": 0,
    "training.steps": 1,
    "training.seq_len": 1,
    "training.num_workers": 0,
    "training.skip_nonfinite": 0,
    "training.gc_freq": 1,
    "training.seed": 0,
    "optimizer.weight_decay": 0,
    "optimizer.muon_ns_steps": 1,
    "optimizer.offload_bucket_mb": 1,
    "lr_scheduler.warmup_steps": 0,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0,
    "checkpoint.load_step": -1,
    "checkpoint.max_steps_ahead": 0,
    "checkpoint.timeout_seconds": 1,
    "validation.freq": 1,
    "metrics.log_freq": 1,
    "profiling.profile_freq": 1,
    "comm.init_timeout_seconds": 1,
    "comm.train_timeout_seconds": 1,
    "debug.seed": 0,
}
# Far beyond any run: what is over it is a slip, and would end in a MemoryError or in endless silence.
_AT_MOST = {
    "training.steps": 10**9,
    "training.seq_len": 2**26,
    "training.local_batch_size": 2**20,
    "training.global_batch_size": 2**24,
    "training.num_workers": 1024,
    "parallelism.virtual_pipeline_degree": 1024,
    "parallelism.pipeline_parallel_microbatch_size": 2**20,
    "moe.pad_counts_to": 2**20,
    "checkpoint.timeout_seconds": 10**7,
    "optimizer.muon_ns_steps": 100,
    "optimizer.offload_bucket_mb": 2**20,
    "comm.init_timeout_seconds": 10**7,
    "comm.train_timeout_seconds": 10**7,
}
_TOKENS_AT_MOST = 2**28
_OVERRIDE_AT_MOST = {"num_layers": 10_000, "num_dense_layers": 10_000, "mtp_depth": 100, "num_experts": 100_000}
_OTHER_OVERRIDES_AT_MOST = 2**31
_POSITIVE = ("optimizer.lr", "optimizer.eps")
_SHARES = (
    "activation_offload.fraction",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.min_lr_factor",
    "optimizer.offload_fraction",
    "optimizer.cpu_step_fraction",
)
_BETAS = ("optimizer.beta1", "optimizer.beta2", "optimizer.muon_momentum")


def validate(config: JobConfig, world_size: int = 1) -> None:
    """Refuses what cannot run, before any process group exists. Creates ``job.dump_folder``.

    Args:
        config: what load_config returned.
        world_size: processes of the job.

    Raises:
        ConfigError: the value, the rule and the way out.
    """
    _check_ranges(config)
    _check_sizes(config)
    _check_data(config)
    _check_checkpoint(config)
    _check_profiling(config)
    _check_optimizer(config)
    _check_recompute(config)
    degrees = resolve_degrees(config.parallelism, world_size)
    batch = resolve_batch(config, degrees.dp_replicate * degrees.dp_shard)
    tokens = batch.local * config.training.seq_len
    if tokens > _TOKENS_AT_MOST:
        raise ConfigError(
            f"training.local_batch_size x training.seq_len = {batch.local} x {config.training.seq_len} = {tokens} "
            f"tokens per process and forward pass: must be at most {_TOKENS_AT_MOST}. Accumulate smaller batches."
        )
    if config.metrics.enable_wandb:
        _need("wandb", "metrics.enable_wandb", "titan_moe[wandb]")
    _check_writable(config.job.dump_folder, "job.dump_folder")
    if config.checkpoint.enable:
        _check_writable(os.path.join(config.job.dump_folder, config.checkpoint.folder), "checkpoint.folder")


def resolved_seed(config: JobConfig) -> int:
    """The run's seed: ``debug.seed`` when set, else ``training.seed``."""
    return config.training.seed if config.debug.seed is None else config.debug.seed


def resolved_dtypes(config: JobConfig) -> tuple[str, str]:
    """Dtype names of the parameters and of compute.

    ``training.dtype = "float16"`` keeps float32 parameters: AdamW's second moment underflows in float16.
    """
    dtype, compute = config.training.dtype, config.training.mixed_precision_param
    return ("float32" if dtype == "float16" else dtype), compute or dtype


def left_out_of_loading(config: JobConfig) -> tuple[set[str], list[str]]:
    """What a resume starts anew: names of ``LOADABLE``, and patterns of the model's tensors."""
    if config.checkpoint.load_only == "model":
        return set(LOADABLE), []
    names = config.checkpoint.exclude_from_loading
    return set(names) & set(LOADABLE), [name for name in names if name not in LOADABLE]


def model_overrides(config: JobConfig) -> dict[str, Any]:
    """Fields of the model's configuration that the run sets: ``[moe]`` keys, then ``[model.override]`` on top."""
    moe = {field.name: getattr(config.moe, field.name) for field in fields(config.moe)}
    if moe.pop("force_balance"):
        moe["selection"] = "round_robin"
    return {name: value for name, value in moe.items() if value is not None} | config.model.override


class Batch(NamedTuple):
    """Sequences of one optimizer step: ``total = local x data-parallel processes x passes``."""

    local: int
    """Per process and forward pass."""
    total: int
    """Per optimizer step."""
    passes: int
    """Forward passes accumulated."""


def resolve_batch(config: JobConfig, dp_size: int) -> Batch:
    """How the global batch is cut; a local size of -1 shares it among the processes without accumulation.

    Args:
        config: the run's configuration.
        dp_size: processes that read different data.

    Raises:
        ConfigError: the global batch is not a multiple of local batch x processes.
    """
    total, local = config.training.global_batch_size, config.training.local_batch_size
    if local < 1 and local != -1:
        raise ConfigError(f"training.local_batch_size = {local}: must be at least 1, or -1 for a share of the global.")
    if local == -1:
        if total < 1 or total % dp_size:
            near = " or ".join(str(size) for size in _around(total, dp_size))
            raise ConfigError(
                f"training.local_batch_size = -1 shares training.global_batch_size = {total} among {dp_size} "
                f"data-parallel processes, which does not divide. Nearest legal global sizes: {near}."
            )
        return Batch(total // dp_size, total, 1)
    one_pass = local * dp_size
    if total == -1:
        return Batch(local, one_pass, 1)
    if total < 1 or total % one_pass:
        near = " or ".join(str(size) for size in _around(total, one_pass))
        fits = 0 < total < one_pass and total % dp_size == 0
        smaller = f" Or set training.local_batch_size = {total // dp_size}, or -1." if fits else ""
        raise ConfigError(
            f"training.global_batch_size = {total} is not a multiple of training.local_batch_size x data-parallel "
            f"processes = {local} x {dp_size} = {one_pass}. Nearest legal: {near}; -1 means {one_pass}.{smaller}"
        )
    return Batch(local, total, total // one_pass)


def _around(value: int, unit: int) -> list[int]:
    """The positive multiples of ``unit`` next to ``value``."""
    below = value // unit * unit
    return [size for size in (below, below + unit) if size > 0] if value > 0 else [unit]


def _value(config: JobConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _check_ranges(config: JobConfig) -> None:
    for section in fields(config):
        for field in fields(getattr(config, section.name)):
            value = _value(config, f"{section.name}.{field.name}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{section.name}.{field.name} = {value}: must be finite.")
    for key, least in _AT_LEAST.items():
        value = _value(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key} = {value}: must be at least {least}.")
    for key in _POSITIVE:
        if _value(config, key) <= 0:
            raise ConfigError(f"{key} = {_value(config, key)}: must be greater than 0.")
    for key in _SHARES:
        value = _value(config, key)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{key} = {value}: must be a share between 0 and 1.")
    for key in _BETAS:
        if not 0 <= _value(config, key) < 1:
            raise ConfigError(f"{key} = {_value(config, key)}: must be at least 0 and less than 1.")
    for key in ("training.seed", "debug.seed"):
        value = _value(config, key)
        if value is not None and value >= 2**63:
            raise ConfigError(f"{key} = {value}: must be less than 2**63.")


def _check_recompute(config: JobConfig) -> None:
    mode, targets = config.activation_checkpoint.mode, config.activation_checkpoint.targets
    if (mode == "targets") != bool(targets):
        way = "Name at least one" if mode == "targets" else "Set mode = 'targets', or leave targets out"
        raise ConfigError(
            f"activation_checkpoint.targets = {targets} with activation_checkpoint.mode = {mode!r}: targets belong to "
            f"mode 'targets', which needs them. {way}."
        )


def _check_sizes(config: JobConfig) -> None:
    for key, most in _AT_MOST.items():
        value = _value(config, key)
        if value is not None and value > most:
            raise ConfigError(f"{key} = {value}: must be at most {most}.")
    for name, value in config.model.override.items():
        most = _OVERRIDE_AT_MOST.get(name, _OTHER_OVERRIDES_AT_MOST)
        if type(value) is int and value > most:
            raise ConfigError(f"model.override.{name} = {value}: must be at most {most}.")


def _check_data(config: JobConfig) -> None:
    training, validation = config.training, config.validation
    _check_dataset("training", training.dataset, training.dataset_path)
    if validation.enable:
        own = validation.dataset is not None
        kind = validation.dataset if own else training.dataset
        path = validation.dataset_path or (None if own else training.dataset_path)
        _check_dataset("validation", kind, path)
        if validation.steps < 1 and validation.steps != -1:
            raise ConfigError(f"validation.steps = {validation.steps}: must be at least 1, or -1 for all batches.")
        if not 0 < validation.fraction < 1:
            raise ConfigError(f"validation.fraction = {validation.fraction}: must be between 0 and 1, both excluded.")

    tokenizer = config.model.tokenizer
    if tokenizer != "bytes":
        file = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else tokenizer
        if not os.path.isfile(file):
            raise ConfigError(
                f"model.tokenizer = {tokenizer!r}: no such file: {file}. Name a tokenizer.json or its folder, "
                "or use 'bytes'."
            )


def _check_dataset(section: str, kind: str, path: str | None) -> None:
    if kind not in DATASETS:
        raise ConfigError(f"{section}.dataset = {kind!r}: unknown dataset.{nearest(kind, DATASETS)}")
    if kind == "huggingface":
        _need("datasets", f"{section}.dataset = 'huggingface'", "titan_moe[hf]")
    if kind == "parquet":
        _need("pyarrow", f"{section}.dataset = 'parquet'", "titan_moe[parquet]")
    if kind == "stdlib":
        return
    if path is None:
        raise ConfigError(
            f"{section}.dataset = {kind!r} needs {section}.dataset_path. Name a file or folder, "
            f"or set {section}.dataset = 'stdlib'."
        )
    if not os.path.exists(path):
        raise ConfigError(f"{section}.dataset_path = {path!r}: no such file or folder.")


def _check_checkpoint(config: JobConfig) -> None:
    checkpoint = config.checkpoint
    path = checkpoint.initial_load_path
    if path is not None and not os.path.exists(path):
        raise ConfigError(f"checkpoint.initial_load_path = {path!r}: no such file or folder.")
    if checkpoint.initial_load_in_hf and path is None:
        raise ConfigError("checkpoint.initial_load_in_hf needs checkpoint.initial_load_path: the folder to read.")
    if checkpoint.export_dtype == "source" and not checkpoint.initial_load_in_hf:
        raise ConfigError("checkpoint.export_dtype = 'source' needs checkpoint.initial_load_in_hf: a folder to follow.")
    if not checkpoint.enable:
        keys = {"initial_load_path": None, "load_step": -1, "load_only": None, "exclude_from_loading": []}
        keys |= {"max_steps_ahead": 0}
        for key, unset in keys.items():
            if getattr(checkpoint, key) != unset:
                raise ConfigError(f"checkpoint.{key} needs checkpoint.enable. Add --checkpoint.enable.")
        return
    if path is not None and checkpoint.initial_load_in_hf and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"checkpoint.initial_load_path = {path!r}: no config.json in it, so no Hugging Face folder.")
    ahead = checkpoint.max_steps_ahead
    if ahead and checkpoint.async_mode == "disabled":
        raise ConfigError(
            f"checkpoint.max_steps_ahead = {ahead}: with checkpoint.async_mode = 'disabled' training always waits "
            "until a checkpoint is written. Leave it at 0, or choose another async_mode."
        )
    if ahead >= checkpoint.interval:
        raise ConfigError(
            f"checkpoint.max_steps_ahead = {ahead} with checkpoint.interval = {checkpoint.interval}: the next "
            "checkpoint waits for the one before already. Choose fewer steps than the interval, or 0."
        )
    if checkpoint.load_only and checkpoint.exclude_from_loading:
        raise ConfigError(
            "checkpoint.load_only = 'model' already leaves out all but the model, so checkpoint.exclude_from_loading "
            "does nothing. Set one of them."
        )
    for name in checkpoint.exclude_from_loading:
        if name not in LOADABLE and not name.startswith("model."):
            raise ConfigError(
                f"checkpoint.exclude_from_loading has {name!r}: neither a pattern that starts with 'model.' nor one of "
                f"{', '.join(LOADABLE)}.{nearest(name, LOADABLE)}"
            )
    folder = os.path.join(config.job.dump_folder, checkpoint.folder)
    if checkpoint.load_step >= 0 and not os.path.isdir(os.path.join(folder, f"step-{checkpoint.load_step}")):
        raise ConfigError(
            f"checkpoint.load_step = {checkpoint.load_step}: no step-{checkpoint.load_step} in {folder}. "
            "Name a step that is there, or -1 for the newest."
        )


def _check_profiling(config: JobConfig) -> None:
    profiling = config.profiling
    if (profiling.enable_profiling or profiling.enable_memory_snapshot) and profiling.profile_freq < 2:
        raise ConfigError(f"profiling.profile_freq = {profiling.profile_freq}: must be at least 2 (one step warms up).")
    if profiling.enable_memory_snapshot:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "profiling.enable_memory_snapshot = true needs a CUDA GPU, and there is none. Switch it off."
            )


def _check_optimizer(config: JobConfig) -> None:
    optimizer, dtype = config.optimizer, config.training.dtype
    group_rules(optimizer)
    if optimizer.qk_clip_threshold is not None:
        if optimizer.qk_clip_threshold <= 0:
            raise ConfigError(f"optimizer.qk_clip_threshold = {optimizer.qk_clip_threshold}: must be greater than 0.")
        if config.compile.enable:
            raise ConfigError(
                "optimizer.qk_clip_threshold with compile.enable: logits are watched in Python, which compiled layers "
                "leave out. Switch one of them off."
            )
    for key, unset in (("master_dtype", None), ("store_param_remainders", False)):
        value = getattr(optimizer, key)
        if value != unset and dtype != "bfloat16":
            raise ConfigError(
                f"optimizer.{key} = {value!r} keeps what bfloat16 parameters lack, and training.dtype = {dtype!r}. "
                "Set training.dtype = 'bfloat16', or leave it out."
            )
    if optimizer.store_param_remainders and optimizer.master_dtype is not None:
        raise ConfigError(
            f"optimizer.store_param_remainders with optimizer.master_dtype = {optimizer.master_dtype!r}: two masters "
            "for one parameter. Leave one of them out."
        )
    stored = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype, optimizer.master_dtype)
    own_dtype = dtype == "bfloat16" and not (optimizer.store_param_remainders or optimizer.master_dtype)
    if optimizer.stochastic_rounding and not own_dtype and not any(kind not in (None, "float32") for kind in stored):
        raise ConfigError(
            "optimizer.stochastic_rounding: nothing is stored in less than float32. Choose exp_avg_dtype, "
            "exp_avg_sq_dtype or training.dtype, or leave it out."
        )


def _need(module: str, key: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{key} needs the package {module}, which is not installed: pip install '{extra}'.")


def _check_writable(folder: str, key: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{key} = {folder!r}: cannot be written ({reason}). Name a folder you can write to."
        ) from None
