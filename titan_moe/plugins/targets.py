"""Parts of a model by name: the named targets of recompute and offload, and any pattern of module names."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from titan_moe.errors import ConfigError, nearest
from titan_moe.modules import NamePattern, modules_by_name


def _is_moe(module: nn.Module) -> bool:
    return isinstance(getattr(module, "experts", None), nn.Module)


def _is_dense(module: nn.Module) -> bool:
    return not _is_moe(module)


@dataclass(frozen=True)
class Part:
    """Where a target lies.

    Attributes:
        pattern: of module names, see ``NamePattern``.
        method: of those modules.
        accepts: further condition on the module.
        only: of what is saved there, just its ``inputs``, or just what is ``made`` there; None: all.
    """

    pattern: str
    method: str = "forward"
    accepts: Callable[[nn.Module], bool] = lambda module: True
    only: Literal["inputs", "made"] | None = None


SHARED = tuple(Part(f"**.{name}") for name in ("shared", "shared_experts", "shared_expert"))
_NONLINEARITY = (Part("**.mlp", "nonlinearity"), Part("**.mlp.shared", "nonlinearity"))

RECOMPUTE: Mapping[str, tuple[Part, ...]] = {
    "layernorm": (Part("**.input_layernorm"), Part("**.post_attention_layernorm")),
    "qk_norm": (
        Part("**.self_attn", "norm_and_rotate", lambda module: module.q_norm is not None),
        Part("**.q_a_layernorm"),
        Part("**.kv_a_layernorm"),
    ),
    "mla_up_proj": (Part("**.self_attn", "up_project"),),
    "core_attn": (Part("**.self_attn", "attend"),),
    "moe_act": _NONLINEARITY,
    "mlp": (Part("**.mlp", accepts=_is_dense),),
    "shared_expert": SHARED,
    "moe": (Part("**.mlp", accepts=_is_moe),),
}
"""What ``activation_checkpoint.targets`` may name, besides patterns."""


@dataclass(frozen=True)
class Match:
    """One method of one module that a target names."""

    target: str
    name: str
    module: nn.Module
    part: Part

    @property
    def method(self) -> str:
        """Of the module."""
        return self.part.method

    def within(self, modules: Container[str]) -> bool:
        """Whether it is a part of one of ``modules``: a whole module covers its methods and all below it."""
        parents = self.name.split(".")
        depths = range(1, len(parents) + (self.method != "forward"))
        return any(".".join(parents[:depth]) in modules for depth in depths)


def is_pattern(target: str) -> bool:
    """Whether ``target`` is a pattern of module names; the names of targets have neither dots nor stars."""
    return "." in target or "*" in target


def check_targets(key: str, targets: Iterable[str], known: Mapping[str, tuple[Part, ...]]) -> None:
    """Refuse names that are neither known nor patterns.

    Raises:
        ConfigError: naming the known ones.
    """
    for target in targets:
        if target not in known and not is_pattern(target):
            hint = nearest(target, known)
            every = "" if "Known" in hint else f" Known: {', '.join(sorted(known))}."
            raise ConfigError(f"{key}: unknown target {target!r}.{hint}{every} Or a pattern of names: '**.o_proj'.")


def find(model: nn.Module, targets: Iterable[str], known: Mapping[str, tuple[Part, ...]]) -> list[Match]:
    """What ``targets`` name in ``model``, in the order of the model, then of the targets."""
    parts = {target: known.get(target) or (Part(target),) for target in targets}
    patterns = {part.pattern: NamePattern(part.pattern) for of_target in parts.values() for part in of_target}
    return [
        Match(target, name, module, part)
        for name, module in modules_by_name(model)
        for target, of_target in parts.items()
        for part in of_target
        if patterns[part.pattern].matches(name) and hasattr(module, part.method) and part.accepts(module)
    ]


def check_all_matched(key: str, targets: Iterable[str], matches: Iterable[Match]) -> None:
    """Refuse a target without a match.

    Raises:
        ConfigError: a target names nothing in the model.
    """
    found = {match.target for match in matches}
    for target in targets:
        if target not in found:
            raise ConfigError(
                f"{key}: {target!r} matched nothing in the model. Take it out, or name modules that it has."
            )


def outermost(matches: Iterable[Match]) -> Iterator[Match]:
    """Without those that lie within another."""
    matches = list({(match.name, match.method): match for match in matches}.values())
    whole = {match.name for match in matches if match.method == "forward"}
    return (match for match in matches if not match.within(whole))
