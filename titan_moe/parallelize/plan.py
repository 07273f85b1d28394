"""A plan is a table from name patterns to styles; here it meets a module's names."""

from collections.abc import Mapping

from torch import nn

from titan_moe.errors import ConfigError, nearest
from titan_moe.modules import NamePattern, modules_by_name
from titan_moe.parallelize.styles import Style

Plan = Mapping[str, Style]
"""Patterns in order of precedence. See :func:`match_plan`."""

_SHOWN = 12


def match_plan(module: nn.Module, plan: Plan, *, all_patterns: bool = True) -> dict[str, tuple[nn.Module, Style]]:
    """Which style each submodule gets, by name.

    Patterns are those of :class:`~titan_moe.modules.NamePattern`. The first pattern that matches wins.

    Args:
        module: whose submodules are matched.
        plan: the table.
        all_patterns: refuse a pattern that matched nothing. Tables for many models at once have such patterns.

    Raises:
        ConfigError: a pattern matched nothing, or a module that owns parameters was matched by none.
    """
    matchers = {pattern: NamePattern(pattern) for pattern in plan}
    used: set[str] = set()
    matched: dict[str, tuple[nn.Module, Style]] = {}
    uncovered = []
    for name, submodule in modules_by_name(module):
        pattern = next((p for p, matcher in matchers.items() if matcher.matches(name)), None)
        if pattern is not None:
            used.add(pattern)
            matched[name] = submodule, plan[pattern]
        elif any(True for _ in submodule.parameters(recurse=False)):
            uncovered.append((name, submodule))
    unused = [pattern for pattern in plan if pattern not in used]
    if all_patterns and unused:
        names = [name for name, _ in modules_by_name(module) if name]
        raise ConfigError(
            f"the plan's pattern {unused[0]!r} matches no module.{nearest(unused[0], names)}"
            + (f" {len(unused) - 1} other patterns match nothing either." if len(unused) > 1 else "")
        )
    if uncovered:
        raise ConfigError(_describe(uncovered))
    return matched


def _describe(uncovered: list[tuple[str, nn.Module]]) -> str:
    lines = []
    for name, module in uncovered[:_SHOWN]:
        owned = ", ".join(f"{n} {list(p.shape)}" for n, p in module.named_parameters(recurse=False))
        lines.append(f"{name or 'the module itself'} ({type(module).__name__}: {owned})")
    rest = f" and {len(uncovered) - _SHOWN} more" if len(uncovered) > _SHOWN else ""
    return (
        f"no pattern of the plan covers {'; '.join(lines)}{rest}. Add a pattern for each: Colwise, Rowwise or "
        "VocabParallel to share it, SequenceParallel or Replicate to keep it whole."
    )
