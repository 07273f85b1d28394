"""Modules of any model by name, and their methods replaced in place."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

# Wrappers add these to names; patterns do not know of them.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def modules_by_name(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules by their names without wrappers; of a wrapper and what it wraps, the inner one."""
    found = {}
    for name, submodule in module.named_modules():
        found[".".join(part for part in name.split(".") if part not in _WRAPPERS)] = submodule
    yield from found.items()


class NamePattern:
    """A dotted name in which ``*`` stands for any characters within one part, ``**`` for any number of parts.

    None included: ``**.q_proj`` matches ``q_proj`` and ``layers.0.self_attn.q_proj``.
    """

    def __init__(self, pattern: str) -> None:
        # Every part ends in a dot, names too, so that "**" may stand for nothing.
        parts = pattern.split(".")
        self._regex = re.compile("".join(r"(?:[^.]+\.)*" if part == "**" else _part(part) + r"\." for part in parts))

    def matches(self, name: str) -> bool:
        """Whether the whole of ``name`` fits."""
        return self._regex.fullmatch(f"{name}." if name else "") is not None


def _part(part: str) -> str:
    return "[^.]*".join(map(re.escape, part.split("*")))


def wrap(module: nn.Module, method: str, around: Callable[..., Any]) -> None:
    """Replace ``module.method(...)`` by ``around(module, inner, ...)``, where ``inner`` is the method as it was.

    Names and classes stay, and a deep copy of the module wraps the copy.
    """
    bound = getattr(module, method)
    if getattr(bound, "__self__", None) is module:
        function = bound.__func__
    else:

        def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return bound(*args, **kwargs)

    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not a method: the compiler sees through this.
        return around(self, partial(function, self), *args, **kwargs)

    setattr(module, method, MethodType(wrapped, module))


def parameters_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names without wrappers; a list of pipeline stages has global names in its elements."""
    for part in model if isinstance(model, nn.ModuleList) else [model]:
        for name, parameter in part.named_parameters():
            yield ".".join(piece for piece in name.split(".") if piece not in _WRAPPERS), parameter
