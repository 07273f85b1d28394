"""Values and the types that a dataclass declares for them."""

from dataclasses import fields
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from titan_moe.errors import ConfigError

_NAMES = {
    int: "a whole number (int)",
    float: "a number (float)",
    bool: "true or false (bool)",
    str: "a string",
    NoneType: "None",
    list: "a list of strings",
    dict: "a table",
}


def check_types(config: Any) -> None:
    """Checks every field of a dataclass instance against its type hint.

    Raises:
        ConfigError: names the first field that does not fit, its value and the type.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        check_type(field.name, getattr(config, field.name), hints[field.name])


def check_type(name: str, value: Any, hint: Any) -> None:
    """Checks one value against its hint, as ``convert`` does.

    Raises:
        ConfigError: names ``name``, the value and the type.
    """
    if not convert(value, hint)[0]:
        raise refusal(name, value, hint)


def refusal(name: str, value: Any, hint: Any) -> ConfigError:
    """The error for a value that does not fit its hint: the name, the value, the type and the nearest choice."""
    choices = [choice for arm in arms(hint) if get_origin(arm) is Literal for choice in get_args(arm)]
    close = get_close_matches(str(value), choices, n=1)
    near = f" Did you mean {close[0]!r}?" if close else ""
    return ConfigError(f"{name} = {value!r}: expected {describe(hint)}.{near}")


def convert(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether the value fits the hint, and the value to store. An int fits a float; a bool fits no number."""
    origin = get_origin(hint)
    if hint is Any:
        return True, value
    if origin in (Union, UnionType):
        for arm in get_args(hint):
            fits, converted = convert(value, arm)
            if fits:
                return True, converted
        return False, value
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint), value
    if origin is list:
        (item,) = get_args(hint)
        return isinstance(value, list) and all(convert(entry, item)[0] for entry in value), value
    if hint is float and type(value) is int:
        try:
            return True, float(value)
        except OverflowError:
            return False, value
    # A bool is an int to Python.
    return isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool)), value


def arms(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the one type that the hint is."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def describe(hint: Any) -> str:
    """The type in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(describe(arm) for arm in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if origin is list and get_origin(get_args(hint)[0]) is dict:
        return "a list of tables, in a TOML file"
    return _NAMES[origin or hint]
