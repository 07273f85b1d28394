"""A plan is a table from name patterns to styles; here it meets a module's names."""

import re
from collections.abc import Iterator, Mapping

from torch import nn

from titan_moe.errors import ConfigError, nearest
from titan_moe.parallelize.styles import Style

Plan = Mapping[str, Style]
"""Patterns in order of precedence. See :func:`match_plan`."""

# Wrappers add these to names; a plan does not know of them.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
_SHOWN = 12


def match_plan(module: nn.Module, plan: Plan, *, all_patterns: bool = True) -> dict[str, tuple[nn.Module, Style]]:
    """Which style each submodule gets, by name.

    A pattern is a dotted name. ``*`` stands for any characters within one part, ``**`` for any number of parts, none
    included: ``**.q_proj`` matches ``q_proj`` and ``layers.0.self_attn.q_proj``. The first pattern that matches wins.

    Args:
        module: whose submodules are matched.
        plan: the table.
        all_patterns: refuse a pattern that matched nothing. Tables for many models at once have such patterns.

    Raises:
        ConfigError: a pattern matched nothing, or a module that owns parameters was matched by none.
    """
    matchers = {pattern: _compile(pattern) for pattern in plan}
    used: set[str] = set()
    matched: dict[str, tuple[nn.Module, Style]] = {}
    uncovered = []
    for name, submodule in modules_by_name(module):
        pattern = next((p for p, matcher in matchers.items() if matcher.fullmatch(f"{name}." if name else "")), None)
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


def modules_by_name(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules by their names without wrappers; of a wrapper and what it wraps, the inner one."""
    found = {}
    for name, submodule in module.named_modules():
        found[".".join(part for part in name.split(".") if part not in _WRAPPERS)] = submodule
    yield from found.items()


def _compile(pattern: str) -> re.Pattern[str]:
    # Every part ends in a dot, names too, so that "**" may stand for nothing.
    parts = pattern.split(".")
    return re.compile("".join(r"(?:[^.]+\.)*" if part == "**" else _part(part) + r"\." for part in parts))


def _part(part: str) -> str:
    return "[^.]*".join(map(re.escape, part.split("*")))


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
