"""Bytes of parameters, gradients and optimizer state, as ``[training]`` and ``[optimizer]`` have them stored.

The same choices as ``titan_moe.optim`` makes, without torch; tests hold them equal to the state of real optimizers.
"""

import re
from typing import Any, NamedTuple

from titan_moe.config import JobConfig, resolved_dtypes
from titan_moe.config.groups import group_rules
from titan_moe.config.job import Optimizer
from titan_moe.models import ModelConfig
from titan_moe.models.count import Shape, mtp_is_dense
from titan_moe.parallelize.layout import Stage
from titan_moe.planner.parameters import stage_entries

BLOCK = 32
"""Elements that share a scale of two bytes in float16 and float8."""
_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
_BIAS = re.compile(r"(^|[._])(bias|b\d+)$")
_TABLE = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")


def size_of(dtype: str) -> int:
    """Bytes of an element."""
    return _SIZES[dtype]


class Stored(NamedTuple):
    """How a run keeps its parameters; bytes an element."""

    by_name: dict[str, list[float]]
    """Parameter, gradient, and state on the device between steps, for every name of ``stage_entries``."""
    state: float
    """All state, on average."""
    away: float
    """Of that, on the host between steps."""


def stored_bytes(config: JobConfig, model: ModelConfig, s: Shape) -> Stored:
    """What ``[optimizer]`` and ``[training]`` say.

    What a rule of ``optimizer.groups`` says of single layers is spread over all of them.
    """
    optimizer = config.optimizer
    dtype = resolved_dtypes(config)[0]
    whole = Stage(embedding=True, layers=tuple(range(s.num_layers)), mtp=tuple(range(s.mtp)), head=True)
    stored, count, totals = {}, 0.0, {"AdamW": 0.0, "Muon": 0.0}
    for prefix, _, entries in stage_entries(s, whole, mtp_is_dense(s)):
        for name, elements, last, _ in entries:
            if prefix + name in stored:
                continue
            # The router computes in fp32 at least, and so it is kept.
            own = max(dtype, model.moe.router_dtype, key=size_of) if "mlp.router." in name else dtype
            grad = size_of(optimizer.main_grad_dtype or own)
            layers = _layers(prefix, name, s)
            share = _muon_share(prefix + name, last, optimizer, layers)
            shares = {"AdamW": 1 - share, "Muon": share}
            parts = {kind: part * _state_bytes(optimizer, kind, own, last) for kind, part in shares.items()}
            count += elements * len(layers)
            for kind, part in parts.items():
                totals[kind] += elements * len(layers) * part
            stored[prefix + name] = [size_of(own), grad, sum(parts.values())]
    total = sum(totals.values())
    away = max(optimizer.offload_fraction, optimizer.cpu_step_fraction * totals["AdamW"] / total)
    here = {name: [weight, grad, state * (1 - away)] for name, (weight, grad, state) in stored.items()}
    return Stored(here, total / count, away * total / count)


def _layers(prefix: str, name: str, s: Shape) -> range:
    """Numbers that the star of a name stands for."""
    if not prefix.startswith("layers"):
        return range(s.mtp if prefix else 1)
    if not name.startswith("mlp."):
        return range(s.num_layers)
    is_dense = name.startswith(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    return range(s.num_dense) if is_dense else range(s.num_dense, s.num_layers)


def _muon_share(name: str, last: float, optimizer: Optimizer, layers: range) -> float:
    """Share of a parameter's layers that Muon updates."""
    matrix = last > 0 and _BIAS.search(name) is None
    usual = optimizer.name if matrix and _TABLE.search(name) is None else "AdamW"
    rules: list[tuple[Any, str | None]] = []
    if optimizer.groups:
        # With torch, which a plan without rules does not need.
        from titan_moe.modules import NamePattern

        rules = [(NamePattern(rule.pattern), rule.optimizer) for rule in group_rules(optimizer)]
    chosen = 0
    for layer in layers:
        own = name.replace("*", str(layer))
        first = next((algorithm for pattern, algorithm in rules if pattern.matches(own)), None)
        chosen += (first or usual) == "Muon"
    return chosen / len(layers)


def _state_bytes(optimizer: Optimizer, kind: str, dtype: str, last: float) -> float:
    """Moments, and what is kept beside a parameter of ``dtype`` for its updates."""
    computed = max("float32", dtype, key=size_of)

    def stored(asked: str | None) -> float:
        if asked not in ("float16", "float8"):
            return size_of(asked or computed)
        return size_of(asked) + 2 * -(-last // BLOCK) / last if last else size_of(computed)

    total = stored(optimizer.exp_avg_dtype)
    if kind == "AdamW":
        total += stored(optimizer.exp_avg_sq_dtype)
    if dtype != "bfloat16":
        return total
    if optimizer.store_param_remainders:
        return total + 2
    return total + (stored(optimizer.master_dtype) if optimizer.master_dtype else 0)
