"""``optimizer.groups``: tables of the TOML file that give parameters, by name, hyper-parameters of their own."""

from dataclasses import dataclass, fields
from typing import Literal, get_type_hints

from titan_moe.config.job import Optimizer
from titan_moe.config.types import convert, refusal
from titan_moe.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """Parameters whose name fits ``pattern`` and none of the rules before. What is None is as without the rule."""

    pattern: str
    """A name in which * stands for any characters within one part and ** for any number of parts."""
    optimizer: Literal["AdamW", "Muon"] | None = None
    """Which optimizer."""
    lr: float | None = None
    """Peak learning rate; the schedule scales it as it does optimizer.lr."""
    weight_decay: float | None = None
    """Weight decay, of every parameter that the rule covers."""
    row_blocks: list[int] | None = None
    """Muon: rows of consecutive blocks that are matrices of their own; repeated until all rows are taken."""


def group_rules(config: Optimizer) -> list[GroupRule]:
    """``config.groups``, checked.

    Raises:
        ConfigError: an unknown or missing key, a value of another type, or out of its range.
    """
    hints = get_type_hints(GroupRule)
    rules = []
    for index, given in enumerate(config.groups):
        where, table = f"optimizer.groups[{index}]", {}
        for key, value in given.items():
            if key not in hints:
                raise ConfigError(f"{where}: unknown key {key!r}.{nearest(key, hints)}")
            fits, table[key] = convert(value, hints[key])
            if not fits:
                raise refusal(f"{where}.{key}", value, hints[key])
        if not table.get("pattern"):
            raise ConfigError(f"{where} = {table}: has no pattern. Add pattern = 'name of parameters'.")
        rule = GroupRule(**table)
        for key in ("lr", "weight_decay"):
            value = getattr(rule, key)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{where}.{key} = {value!r}: must be a finite number, 0 or more.")
        blocks = rule.row_blocks
        if blocks is not None and (not blocks or min(blocks) < 1):
            raise ConfigError(f"{where}.row_blocks = {blocks!r}: must be a list of row counts, each at least 1.")
        if rule == GroupRule(pattern=rule.pattern):
            known = ", ".join(field.name for field in fields(GroupRule) if field.name != "pattern")
            raise ConfigError(f"{where} = {table}: changes nothing. Add one of {known}.")
        rules.append(rule)
    return rules
