"""Whether values have the types that a dataclass declares."""

import sys
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from titan_moe.errors import ConfigError, nearest


def check_types(config: Any) -> None:
    """Checks every field of a dataclass instance against its type hint.

    Raises:
        ConfigError: names the first field that does not fit, its value and the type.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        check_type(field.name, getattr(config, field.name), hints[field.name])


def check_type(name: str, value: Any, hint: Any) -> None:
    """Checks one value; an int fits a float, a bool fits no number.

    Raises:
        ConfigError: names ``name``, the value and the type.
    """
    if _fits(value, hint):
        return
    if get_origin(hint) is Literal:
        raise ConfigError(f"{name} = {value!r}: not a known choice.{nearest(value, get_args(hint))}")
    raise ConfigError(f"{name} = {value!r}: must be {hint.__name__ if isinstance(hint, type) else hint}.")


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, arg) for arg in get_args(hint))
    if hint is float:
        # An int may be too large for a float.
        fits = isinstance(value, int) and abs(value) <= sys.float_info.max
        return (fits or isinstance(value, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)
