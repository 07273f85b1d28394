"""Where documents come from: files on disk, read one document at a time in a fixed order.

A document is a key that names it (a relative path, with the record's number where a file holds several)
and its text. Keys do not depend on where the dataset lies, so the split by key survives a move.
"""

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_moe.errors import ConfigError, DataError, nearest

# Half of the standard library is tests, whose content changes with every Python version; code tables
# and generated help texts are not prose or code that anybody wrote.
STDLIB_EXCLUDED = frozenset(
    {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass
class BadRecords:
    """What happens to a record that cannot be used: an error, or skipped and counted.

    Raises:
        DataError: at the first bad record, unless ``skip``.
    """

    skip: bool = False
    count: int = 0
    first: str = ""

    def __call__(self, message: str) -> None:
        if not self.skip:
            raise DataError(
                f"{message}. Mend it, or set training.skip_bad_records = true to skip and count such records."
            )
        self.first = self.first or message
        self.count += 1


@dataclass
class Source:
    """A dataset on disk.

    Attributes:
        kind: one of the names in ``KINDS``.
        root: the file or folder.
        files: every file that is read, in reading order.
    """

    kind: str
    root: Path
    files: list[Path]
    read: Callable[[Path, str, BadRecords], Iterator[tuple[str, str]]] = field(repr=False)

    def name(self, file: Path) -> str:
        """The file's path under the root, with forward slashes on every system."""
        return file.relative_to(self.root).as_posix() if self.root.is_dir() else file.name

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Path, size in bytes and modification time in ns of every file: changes when the data does."""
        stats = [(file.resolve(), _stat(file)) for file in self.files]
        return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]

    def num_file_bytes(self) -> int:
        """Size of all files in bytes, as they lie on disk."""
        return sum(_stat(file).st_size for file in self.files)

    def documents(self, bad: BadRecords) -> Iterator[tuple[str, str]]:
        """Yields ``(key, text)`` in a fixed order; texts may be empty.

        Raises:
            DataError: a file cannot be read, or a record is bad and ``bad`` does not skip.
        """
        if self.kind == "huggingface":
            yield from _read_huggingface(self.root, self.root.name, bad)
            return
        for file in self.files:
            yield from self.read(file, self.name(file), bad)


def open_source(kind: str, path: str | os.PathLike | None, section: str = "training") -> Source:
    """Finds a dataset's files; reads none of them.

    Args:
        kind: 'stdlib', 'text', 'jsonl', 'parquet' or 'huggingface'.
        path: file or folder; None for stdlib.
        section: configuration section to name in errors.

    Raises:
        ConfigError: unknown kind, a path where none belongs or the reverse, or one that is missing, of the wrong
            sort, or without a fitting file.
    """
    if kind not in KINDS:
        raise ConfigError(f"{section}.dataset = {kind!r} is not a kind of dataset.{nearest(kind, KINDS)}")
    if kind == "stdlib":
        if path is not None:
            raise ConfigError(
                f"{section}.dataset_path = {os.fspath(path)!r} is not used by dataset 'stdlib': "
                f"set {section}.dataset to 'text', 'jsonl', 'parquet' or 'huggingface', or drop the path."
            )
        root = Path(sysconfig.get_path("stdlib"))
        return _found(Source(kind, root, _walk(root, (".py",), STDLIB_EXCLUDED), _read_text), ".py")
    if path is None:
        raise ConfigError(f"{section}.dataset = {kind!r} needs {section}.dataset_path, a file or folder.")
    root, reader, suffixes = Path(path), _READERS[kind], _SUFFIXES[kind]
    if not root.exists():
        raise ConfigError(f"{section}.dataset_path: no file or folder {str(root)!r}.")
    if kind == "huggingface" and not root.is_dir():
        raise ConfigError(f"{str(root)!r} is a file; dataset 'huggingface' reads a folder made by save_to_disk.")
    files = [root] if root.is_file() else _walk(root, suffixes, frozenset({"__pycache__"}))
    return _found(Source(kind, root, files, reader), ", ".join(f"*{suffix}" for suffix in suffixes or ("",)))


def _found(source: Source, pattern: str) -> Source:
    if not source.files:
        raise ConfigError(
            f"The dataset folder {str(source.root)!r} holds no {pattern} file for dataset {source.kind!r}."
        )
    return source


def _walk(root: Path, suffixes: tuple[str, ...], excluded: frozenset[str]) -> list[Path]:
    """Regular files under root, sorted by relative path; hidden names and excluded folders are left out."""
    found = []
    for folder, names, files in os.walk(root, onerror=_raise_unreadable):
        names[:] = [name for name in names if name not in excluded and not name.startswith(".")]
        found += [
            Path(folder, file)
            for file in files
            if not file.startswith(".") and (not suffixes or file.endswith(suffixes))
        ]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).parts)


def _unreadable(error: OSError) -> DataError:
    return DataError(f"Cannot read {str(error.filename)!r}: {error.strerror}.")


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(error) from error


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise _unreadable(error) from error


def _read_text(file: Path, name: str, bad: BadRecords) -> Iterator[tuple[str, str]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error
    try:
        yield name, content.decode("utf-8")
    except UnicodeDecodeError as error:
        bad(f"{file}: not UTF-8 text at byte {error.start} ({error.reason})")


def _read_jsonl(file: Path, name: str, bad: BadRecords) -> Iterator[tuple[str, str]]:
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                text, fault = _jsonl_text(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                if fault:
                    bad(f"{file}:{number}: {fault}")
                else:
                    yield f"{name}:{number}", text
    except OSError as error:
        raise _unreadable(error) from error


def _jsonl_text(line: bytes) -> tuple[str, str]:
    """The record's text, and what is wrong with the record ("" if nothing)."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return "", f"not valid JSON ({error.msg} at column {error.colno})"
    except ValueError:  # Python's bound on the digits of a whole number
        return "", "not usable JSON (a number with too many digits)"
    except RecursionError:
        return "", "not usable JSON (nested too deeply)"
    if not isinstance(record, dict):
        return "", f"a JSON object is expected, found {type(record).__name__}"
    if "text" not in record:
        return "", f"no field 'text' (fields: {', '.join(sorted(record)) or 'none'})"
    return _checked_text(record["text"])


def _checked_text(value: Any) -> tuple[str, str]:
    if not isinstance(value, str):
        return "", f"'text' is {'null' if value is None else type(value).__name__}, not a string"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return "", f"'text' holds a lone surrogate at character {error.start}"
    return value, ""


def _read_parquet(file: Path, name: str, bad: BadRecords) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError("Dataset 'parquet' needs pyarrow: pip install 'titan_moe[parquet]'.") from error
    try:
        with pq.ParquetFile(file) as table:
            _check_text_column(file, table.schema_arrow)
            batches = (batch.column("text") for batch in table.iter_batches(batch_size=1024, columns=["text"]))
            yield from _read_arrow(batches, str(file), name, bad)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {' '.join(str(error).split())}") from error


def _read_huggingface(root: Path, name: str, bad: BadRecords) -> Iterator[tuple[str, str]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError("Dataset 'huggingface' needs datasets: pip install 'titan_moe[hf]'.") from error
    try:
        dataset = datasets.load_from_disk(str(root))
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise DataError(f"{root} is not a folder made by save_to_disk: {' '.join(str(error).split())}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if "train" not in dataset:
            raise DataError(
                f"{root} has no split 'train' (splits: {', '.join(sorted(dataset))}): give one split's folder."
            )
        dataset, name = dataset["train"], f"{name}/train"
    dataset = dataset.with_format("arrow")
    _check_text_column(root, dataset.features.arrow_schema)
    batches = (batch.column("text") for batch in dataset.select_columns(["text"]).iter(batch_size=1024))
    yield from _read_arrow(batches, str(root), name, bad)


def _check_text_column(file: Path, schema: Any) -> None:
    import pyarrow.types as types

    if "text" not in schema.names:
        raise DataError(f"{file} has no column 'text' (columns: {', '.join(schema.names) or 'none'}).")
    column = schema.field("text").type
    if not (types.is_string(column) or types.is_large_string(column)):
        raise DataError(f"{file}: column 'text' is {column}, not a string column.")


def _read_arrow(columns: Iterator[Any], where: str, name: str, bad: BadRecords) -> Iterator[tuple[str, str]]:
    row = 0
    for column in columns:
        for cell in column:
            row += 1
            try:
                text, fault = _checked_text(cell.as_py())
            except UnicodeDecodeError as error:
                text, fault = "", f"'text' is not UTF-8 at byte {error.start}"
            if fault:
                bad(f"{where}, row {row}: {fault}")
            else:
                yield f"{name}:{row}", text


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "huggingface": _read_huggingface}
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "huggingface": (".arrow", ".json"),
}
KINDS = ("stdlib", *_READERS)
