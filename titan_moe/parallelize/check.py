"""Whether a model can be shared out over given degrees; needs no process group and no torch."""

from math import gcd
from typing import Literal, get_args

from titan_moe.config import model_overrides, resolve_batch
from titan_moe.config.degrees import Degrees, check_experts, divisors, reshard_after_forward, resolve_degrees
from titan_moe.config.job import JobConfig, Moe
from titan_moe.config.validate import Batch
from titan_moe.errors import ConfigError, nearest
from titan_moe.models import ModelConfig
from titan_moe.models import config as model_config_of
from titan_moe.moe.config import MoEConfig
from titan_moe.parallelize.stages import check_pipeline, check_schedule

Method = Literal["allgather", "alltoall"]
METHODS: tuple[str, ...] = get_args(Method)


def check_model(config: ModelConfig, degrees: Degrees) -> None:
    """Refuses tensor and expert parallelism that the model's sizes do not allow.

    Heads are not cut, so tp must divide query and key-value heads. Other dims, the vocabulary and experts need not
    divide: the last ranks hold less, but every rank must hold something.

    Raises:
        ConfigError: with the legal degrees.
    """
    check_heads(config.num_heads, config.num_kv_heads, degrees.tp)
    moe = config.moe
    shared_over_tp = {"vocab_size": config.vocab_size}
    if config.num_dense_layers:
        shared_over_tp["ffn_dim"] = config.ffn_dim
    if moe.shared_hidden_dim:
        shared_over_tp["shared_hidden_dim"] = moe.shared_hidden_dim
    for name, size in shared_over_tp.items():
        _check_size(name, size, "tensor_parallel_degree", degrees.tp)
    if config.num_dense_layers >= config.num_layers and degrees.ep * degrees.etp > 1:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {degrees.ep} x expert_tensor_parallel_degree = {degrees.etp}, but "
            f"the model has no experts: all {config.num_layers} layers are dense (num_dense_layers = "
            f"{config.num_dense_layers}). Set both to 1."
        )
    _check_size("hidden_dim", moe.hidden_dim, "expert_tensor_parallel_degree", degrees.etp)
    check_experts(moe.num_experts, degrees)


def check_run(config: JobConfig, world_size: int) -> tuple[ModelConfig, Degrees, Batch]:
    """What a run of ``world_size`` processes is made of, all of it checked; needs no process group.

    Returns:
        the model with the run's overrides, the sizes of all axes, and how the batch is cut.

    Raises:
        ConfigError: with the legal values.
    """
    degrees = resolve_degrees(config.parallelism, world_size)
    batch = resolve_batch(config, degrees.dp_replicate * degrees.dp_shard)
    model_config = model_config_of(config.model.name, config.model.flavor, **model_overrides(config))
    check_layout(config, model_config, degrees, batch.local)
    return model_config, degrees, batch


def check_layout(config: JobConfig, model_config: ModelConfig, degrees: Degrees, local_batch: int) -> None:
    """Refuses a run whose model, sequence or batch does not fit its layout.

    Args:
        config: the run's.
        model_config: with the run's overrides.
        degrees: of the run's parallelism.
        local_batch: sequences of one data-parallel rank and forward pass.

    Raises:
        ConfigError: with the legal values.
    """
    parallelism = config.parallelism
    if config.moe.dispatcher == "local" and degrees.ep * degrees.etp > 1:
        raise ConfigError(
            f"moe.dispatcher = 'local' with expert_parallel_degree {degrees.ep} x expert_tensor_parallel_degree "
            f"{degrees.etp}: tokens have to travel. Leave it out, or set 'alltoall' or 'allgather'."
        )
    if config.moe.recv_capacity_factor is not None:
        _check_bound(config, degrees)
    if config.compile.enable and degrees.tp > 1:
        raise ConfigError(
            f"compile.enable = True with tensor_parallel_degree = {degrees.tp}: graphs with DTensors between them do "
            "not compile. Set compile.enable = False or tensor_parallel_degree = 1."
        )
    reshard_after_forward(parallelism)
    check_schedule(parallelism.pipeline_parallel_schedule)
    seq_len, longest = config.training.seq_len, model_config.max_seq_len
    if seq_len > longest:
        raise ConfigError(
            f"training.seq_len = {seq_len} is beyond the model's max_seq_len = {longest}. "
            f"Set training.seq_len to at most {longest}, or model.override.max_seq_len."
        )
    _check_moe_keys(config.moe, model_config.moe)
    check_model(model_config, degrees)
    check_context(
        config.training.seq_len,
        degrees.cp,
        method=parallelism.context_parallel_method,
        num_heads=model_config.num_heads,
        tp=degrees.tp,
    )
    if degrees.pp > 1:
        check_pipeline(parallelism, model_config, local_batch, compiled=config.compile.enable)
    elif parallelism.virtual_pipeline_degree > 1 or parallelism.pipeline_parallel_layout:
        raise ConfigError(
            "parallelism.virtual_pipeline_degree and pipeline_parallel_layout need pipeline_parallel_degree > 1. "
            "Set it, or leave both out."
        )


def check_context(
    seq_len: int, cp: int, *, method: str = "allgather", num_heads: int | None = None, tp: int = 1
) -> None:
    """Refuses what context parallelism cannot run; needs no process group.

    Args:
        seq_len: tokens of a sequence.
        cp: ranks that share it.
        method: ``allgather`` or ``alltoall``.
        num_heads: query heads of the model, for ``alltoall``.
        tp: tensor-parallel ranks that share the heads.

    Raises:
        ConfigError: with the nearest legal values.
    """
    if method not in METHODS:
        raise ConfigError(f"parallelism.context_parallel_method = {method!r}: unknown.{nearest(method, METHODS)}")
    if cp == 1:
        return
    chunks = 2 * cp
    if seq_len % chunks:
        near = [length for length in (seq_len // chunks * chunks, -(-seq_len // chunks) * chunks) if length]
        raise ConfigError(
            f"training.seq_len = {seq_len} is not a multiple of 2 x context_parallel_degree = {chunks}, the chunks "
            f"that it is cut into. Nearest legal: {' or '.join(map(str, near))}."
        )
    if method == "alltoall" and num_heads is not None and num_heads % (cp * tp):
        legal = [degree for degree in range(1, num_heads + 1) if num_heads % (degree * tp) == 0]
        near = sorted(legal, key=lambda degree: abs(degree - cp))[:2]
        raise ConfigError(
            f"context_parallel_method 'alltoall' shares {num_heads} heads among context_parallel_degree {cp} x "
            f"tensor_parallel_degree {tp} = {cp * tp} ranks, which does not divide. Nearest legal "
            f"context_parallel_degree: {' or '.join(map(str, sorted(near))) or 'none'}; 'allgather' takes any."
        )


def _check_bound(config: JobConfig, degrees: Degrees) -> None:
    """Refuses a bound on received rows where nothing is received, or where ranks hold unequal numbers of tokens."""
    factor, tokens = config.moe.recv_capacity_factor, config.training.seq_len // degrees.cp
    if degrees.ep * degrees.etp == 1:
        raise ConfigError(
            f"moe.recv_capacity_factor = {factor} without expert parallelism does nothing: no rows travel, and nothing "
            "waits for the host. Leave it out."
        )
    if tokens % degrees.tp:
        raise ConfigError(
            f"moe.recv_capacity_factor = {factor} with {tokens} tokens of a sequence over tensor_parallel_degree = "
            f"{degrees.tp}: ranks would hold unequal numbers of tokens. Choose a training.seq_len that it divides, or "
            "leave the bound out."
        )


def _check_moe_keys(section: Moe, moe: MoEConfig) -> None:
    """Keys of [moe] that the model's routing would never read."""
    if section.bias_update_speed and not moe.expert_bias:
        raise ConfigError(
            f"moe.bias_update_speed = {section.bias_update_speed} with a model without expert biases does nothing. "
            "Set model.override.expert_bias = true, or leave it out."
        )
    if section.drop_policy and moe.capacity_factor is None:
        raise ConfigError(
            f"moe.drop_policy = {section.drop_policy!r} without a capacity does nothing. Set moe.capacity_factor, or "
            "leave it out."
        )


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Refuses tp ranks that would share a query or key-value head.

    Raises:
        ConfigError: with the legal degrees.
    """
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads % tp:
            legal = ", ".join(map(str, divisors(gcd(num_heads, num_kv_heads))))
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {tp} does not divide the model's {name} = {heads}. "
                f"Legal tensor_parallel_degree for {num_heads} heads and {num_kv_heads} key-value heads: {legal}."
            )


def _check_size(name: str, size: int, key: str, parts: int) -> None:
    piece = -(-size // parts)
    if piece * (parts - 1) >= size:
        legal = [n for n in range(1, parts) if -(-size // n) * (n - 1) < size]
        raise ConfigError(
            f"parallelism.{key} = {parts} cuts the model's {name} = {size} into pieces of {piece}, which leaves "
            f"ranks with none. Nearest legal {key}: {legal[-1]}."
        )
