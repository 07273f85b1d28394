"""Help pages: every option with its type, unit and default, drawn by tyro from the dataclasses."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, NoReturn, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from titan_moe.config.job import JobConfig


def print_help(target: Callable[..., Any], program: str, description: str | None = None) -> NoReturn:
    """Prints the options of a dataclass or function, and exits.

    Args:
        target: what the options are for.
        program: name shown in the usage line.
        description: text above the options; by default the target's docstring.
    """
    with _rules():
        tyro.cli(target, args=["--help"], prog=program, description=description, use_underscores=True)
    raise AssertionError("tyro exits after its help page")


def with_overrides(model: Any, name: str) -> type:
    """``JobConfig`` with the fields of a model's configuration as ``--model.override.FIELD``.

    Args:
        model: the configuration, whose values are the defaults; those of a dataclass in it are listed too.
        name: what the model is called.
    """
    options = {}
    for key, hint, value, doc in _leaves(model):
        annotated = Annotated[hint, tyro.conf.arg(help=doc)]
        options.setdefault(key, (key, annotated, field(default_factory=lambda value=value: value)))
    overrides = make_dataclass("Overrides", options.values())
    overrides.__doc__ = f"Fields of {name}; those of another model are listed with its --model.name and --model.flavor."
    named = Annotated[overrides, tyro.conf.arg(name="model.override")]
    return make_dataclass("Job", [("overrides", named, field(default_factory=overrides))], bases=(JobConfig,))


def _leaves(config: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Name, type, value and docstring of each field, then of those of dataclasses in it."""
    hints, docs, nested = get_type_hints(type(config)), _docstrings(type(config)), []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            nested.append(value)
        elif entry.init:
            yield entry.name, hints[entry.name], value, docs.get(entry.name, "")
    for value in nested:
        yield from _leaves(value)


def _docstrings(kind: type) -> dict[str, str]:
    """The string under each field, in the class and its bases."""
    found = {}
    for base in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for entry, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[entry.target.id] = inspect.cleandoc(ast.literal_eval(after.value))
    return found


def _rules() -> ConstructorRegistry:
    """How types look where tyro's own form is not what the command line takes."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def switch(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type != bool | None:
            return None
        return PrimitiveConstructorSpec(
            nargs=0,
            metavar="",
            instance_from_str=bool,
            is_instance=lambda value: value is None or isinstance(value, bool),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def words(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type != list[str]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[STR ...]",
            instance_from_str=list,
            is_instance=lambda value: isinstance(value, list),
            str_from_instance=lambda value: value or ["none"],
        )

    @registry.primitive_rule
    def table(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type != dict[str, Any] | None:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="TABLE",
            instance_from_str=lambda words: words[0],
            is_instance=lambda value: value is None or isinstance(value, dict),
            str_from_instance=lambda value: [str(value)],
        )

    return registry
