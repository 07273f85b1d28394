"""TOML and command line into one ``JobConfig``: command line beats TOML beats defaults.

Both sources go through the same strict assignment, so they fail in the same words.
"""

import ast
import inspect
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_origin, get_type_hints

from titan_moe.config.job import JobConfig
from titan_moe.config.types import arms, convert, describe, refusal
from titan_moe.errors import ConfigError, nearest

OVERRIDE = "model.override"

_DESCRIPTION = """Train a Mixture-of-Experts model.

Values given here beat those of the TOML file (--job.config_file), which beat the defaults. A boolean is switched
on by its bare name and off by its no_ form. --model.override.FIELD VALUE, or a key under [model.override], sets any
field of the model's configuration, for example --model.override.num_experts 16. NGPU=n in the environment sets the
number of processes. [[optimizer.groups]] tables, for parameters by name, stand in the TOML file alone."""


def load_config(
    argv: Sequence[str] | None = None,
    *,
    program: str = "run_train.sh",
    model_config: Callable[[str, str], Any] | None = None,
) -> JobConfig:
    """Reads the command line and the TOML file it names. ``--help`` prints every key and exits.

    Args:
        argv: arguments after the program's name; by default those of this process.
        program: name shown in the help page.
        model_config: from name and flavor the model's configuration, whose fields the help page then lists.

    Raises:
        ConfigError: unknown name, wrong type, or a file that cannot be read; the message names the source,
            the key, the value and the nearest legal one.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        from titan_moe.config.help import print_help, with_overrides

        target = JobConfig
        if model_config is not None:
            model = load_config([word for word in argv if word not in ("-h", "--help")]).model
            target = with_overrides(model_config(model.name, model.flavor), f"{model.name}_{model.flavor}")
        print_help(target, program, _DESCRIPTION)
    given = _read_command_line(argv)
    config = JobConfig()
    path = given.get("job.config_file")
    if path is not None:
        _assign_tree(config, _read_toml(path), path)
    for key, value in given.items():
        _assign(config, key, value, "command line")
    config.job.config_file = path
    return config


def from_dict(tree: dict[str, Any], source: str = "saved configuration") -> JobConfig:
    """The configuration whose ``dataclasses.asdict`` is ``tree``.

    Raises:
        ConfigError: unknown name or wrong type; the message names ``source``.
    """
    config = JobConfig()
    _assign_tree(config, tree, source)
    return config


def option_fields() -> dict[str, Field]:
    """Every legal ``section.key`` with its dataclass field, in the order of the dataclasses."""
    return {
        f"{section.name}.{field.name}": field
        for section in fields(JobConfig)
        for field in fields(section.default_factory)
    }


def to_toml(config: JobConfig) -> str:
    """The configuration as TOML that ``load_config`` reads back to an equal one; unset keys are comments."""
    lines = []
    for section in fields(config):
        lines.append(f"[{section.name}]")
        tables = []
        values = getattr(config, section.name)
        for field in fields(values):
            value = getattr(values, field.name)
            if isinstance(value, dict):
                tables += [f"[{section.name}.{field.name}]", *(_toml_entry(k, v) for k, v in value.items())]
            else:
                lines.append(_toml_entry(field.name, value))
        lines += [*tables, ""]
    return "\n".join(lines)


def _read_command_line(argv: Sequence[str]) -> dict[str, Any]:
    """Option name to value, typed; the last of a repeated option counts."""
    legal = option_fields()
    given: dict[str, Any] = {}
    for name, words in _options(argv):
        key = name.replace("-", "_")
        section, _, last = key.rpartition(".")
        positive = f"{section}.{last.removeprefix('no_')}"
        if key.startswith(f"{OVERRIDE}."):
            # What the field is, bool or not, shows when the model reads it.
            off = not words and last.startswith("no_")
            given[positive if off else key] = _literal(_single(name, words)) if words else not off
        elif key in legal and key != OVERRIDE:
            given[key] = _parse(name, words, legal[key].type)
        elif last.startswith("no_") and positive in legal and bool in arms(legal[positive].type):
            if words:
                raise ConfigError(f"command line: --{name} takes no value, got {' '.join(words)!r}.")
            given[positive] = False
        else:
            raise ConfigError(f"command line: unknown option --{name}.{_suggest(key, '--')}")
    return given


def read_options(target: Callable[..., Any], argv: Sequence[str], program: str) -> dict[str, Any]:
    """Options of a command, as keyword arguments of ``target``; ``--help`` prints them and exits.

    Args:
        target: a dataclass or a function; its annotations are the types, parameters without a default are needed.
        argv: arguments after the command's name.
        program: name shown in the help page.

    Raises:
        ConfigError: unknown or missing option, or a value of the wrong type.
    """
    if "-h" in argv or "--help" in argv:
        from titan_moe.config.help import print_help

        print_help(target, program)
    kinds = get_type_hints(target)
    parameters = inspect.signature(target).parameters
    given: dict[str, Any] = {}
    for name, words in _options(argv):
        key = name.replace("-", "_")
        positive = key.removeprefix("no_")
        if key in parameters:
            value = _parse(name, words, kinds[key])
            fits, given[key] = convert(value, kinds[key])
            if not fits:
                raise refusal(f"command line: --{name}", value, kinds[key])
        elif positive in parameters and kinds[positive] is bool and not words:
            given[positive] = False
        else:
            raise ConfigError(f"command line: unknown option --{name}.{nearest(key, parameters)}")
    for key, parameter in parameters.items():
        if key not in given and parameter.default is parameter.empty:
            raise ConfigError(f"command line: --{key} is missing. {program} --help lists the options.")
    return given


def _options(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option's name, and the words up to the next option."""
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"command line: unexpected {token!r}. Options are written --section.key value.")
        name, equals, inline = token[2:].partition("=")
        words = [inline] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        yield name, words


def _parse(name: str, words: list[str], kind: Any) -> Any:
    """The words after an option, as a value of its type; a word that does not fit is left for _assign to refuse."""
    if get_origin(kind) is list:
        return words
    kinds = arms(kind)
    if bool in kinds:
        if not words:
            return True
        word = _single(name, words)
        if word.lower() in ("true", "false"):
            return word.lower() == "true"
        if not (word == "None" and NoneType in kinds):
            section, dot, key = name.rpartition(".")
            raise ConfigError(
                f"command line: --{name} takes no value, got {word!r}. Write --{name} or --{section}{dot}no_{key}."
            )
    if not words:
        dashes = f" One that starts with -- is written --{name}=VALUE." if str in kinds else ""
        raise ConfigError(f"command line: --{name} needs a value: {describe(kind)}.{dashes}")
    word = _single(name, words)
    if word == "None" and NoneType in kinds:
        return None
    for number in (int, float):
        if number in kinds:
            try:
                return number(word)
            except ValueError:
                return word
    return word


def _single(name: str, words: list[str]) -> str:
    if len(words) > 1:
        raise ConfigError(
            f"command line: --{name} takes one value, got {' '.join(words)!r}. Quote a value that holds spaces."
        )
    return words[0]


def _literal(word: str) -> Any:
    """An override's value: a Python or TOML literal, else the word itself."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return word
    return value if value is None or isinstance(value, bool | int | float | str | list | dict) else word


def _assign_tree(config: JobConfig, tree: dict[str, Any], source: str) -> None:
    for section, table in tree.items():
        known = [field.name for field in fields(config)]
        if section not in known:
            if not isinstance(table, dict):
                raise ConfigError(f"{source}: {section} = {table!r} stands outside any section.{_suggest(section)}")
            raise ConfigError(f"{source}: unknown section [{section}].{nearest(section, known)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {section} = {table!r}: expected a section, [{section}], with keys under it.")
        for key, value in table.items():
            _assign(config, f"{section}.{key}", value, source)


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            # Editors on Windows put a byte order mark first.
            return tomllib.loads(file.read().decode("utf-8-sig"))
    except FileNotFoundError:
        folder, name = os.path.split(path)
        found = [entry for entry in _listing(folder or ".") if entry.endswith(".toml")]
        raise ConfigError(f"{path}: no such file.{nearest(name, found)}") from None
    except IsADirectoryError:
        found = [entry for entry in _listing(path) if entry.endswith(".toml")]
        listing = f" It holds {', '.join(sorted(found)[:10])}." if found else ""
        raise ConfigError(f"{path}: is a directory; name a TOML file.{listing}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file: not UTF-8 text at byte {error.start}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None
    except ValueError:  # Python's bound on the digits of a whole number
        raise ConfigError(f"{path}: not usable TOML: a number with too many digits.") from None
    except RecursionError:
        raise ConfigError(f"{path}: not usable TOML: nested too deeply.") from None


def _listing(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _assign(config: JobConfig, key: str, value: Any, source: str) -> None:
    section, _, name = key.partition(".")
    legal = option_fields()
    _check_text(f"{source}: {key}", value)
    if name.startswith("override.") and section == "model":
        config.model.override[name.removeprefix("override.")] = value
    elif key not in legal:
        raise ConfigError(f"{source}: unknown key {key}.{_suggest(key)}")
    else:
        kind = legal[key].type
        fits, converted = convert(value, kind)
        if not fits:
            raise refusal(f"{source}: {key}", value, kind)
        setattr(getattr(config, section), name, converted)


def _check_text(where: str, value: Any) -> None:
    """Refuses lone surrogates, as undecodable bytes of the command line become: no file could hold them."""
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{where} = {value!a}: not Unicode text; it holds half a character.") from None
    except (ValueError, RecursionError):  # too many digits to print
        raise ConfigError(f"{where}: a number with too many digits, or nested too deeply.") from None


def _suggest(key: str, prefix: str = "") -> str:
    """The nearest legal name: in its own section, else the same key in another section, else anywhere."""
    legal = list(option_fields())
    section, _, name = key.rpartition(".")
    last = {option: option.rpartition(".")[2] for option in legal}
    own = [option for option in legal if option.startswith(f"{section}.")] if section else legal
    close = get_close_matches(name, [last[option] for option in own], n=1)
    same = [option for option in own if close and last[option] == close[0]]
    same = (
        same or [option for option in legal if last[option] == name] or get_close_matches(key, legal, n=1, cutoff=0.7)
    )
    if same:
        return f" Did you mean {prefix}{same[0]}?"
    sections = {option.partition(".")[0] for option in legal}
    return nearest(name, [last[option] for option in own]) if section in sections else nearest(section or key, sections)


def _toml_entry(key: str, value: Any) -> str:
    name = key if key.replace("_", "").isalnum() and key.isascii() else _toml(key)
    return f"# {name}: None" if value is None else f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(k)} = {_toml(v)}' for k, v in value.items())}}}"
    return repr(value)
