"""A Hugging Face folder, written by all ranks: each file by one of them, tensor by tensor; complete or not there."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from titan_moe.distributed import broadcast_object, gather_objects, rank, world_size
from titan_moe.errors import CheckpointError
from titan_moe.hf.source import DTYPES

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_OWN_FILES = re.compile(r"(config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json)$")


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardFile:
    """One safetensors file, of which every tensor is written to its place as it comes.

    The format is 8 bytes with the header's length, the header in JSON, and the tensors' bytes without gaps. Wide
    dtypes come first, so that each tensor is aligned.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self.missing = {entry.name: entry for entry in entries}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
            offsets = [end, end := end + entry.nbytes]
            header[entry.name] = {
                "dtype": _CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in self.missing}
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Puts one tensor, of the dtype and shape of its entry, in its place; the last one closes the file."""
        entry = self.missing.pop(name)
        assert tensor.dtype == entry.dtype and tuple(tensor.shape) == entry.shape, f"{name}: {tensor.dtype}"
        self._file.seek(self._starts[name])
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if not self.missing:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def close(self) -> None:
        """Lets go of a file that will not be finished."""
        self._file.close()


class FolderWriter:
    """Writes ``target`` beside it and gives it its name when complete; until then an earlier export stays as it is.

    Other files of an earlier export (a tokenizer, say) are kept. Every rank makes one with the same arguments, calls
    ``write`` for the tensors of its files, and ``finish``; a failure on one rank is reported by ``finish`` on all.

    Args:
        target: new, empty, or an earlier export.
        entries: every tensor of the folder.
        config: for config.json.
        max_shard: largest file in bytes; a larger single tensor gets a file of its own.
    """

    def __init__(self, target: Path, entries: Sequence[Entry], config: dict[str, Any], max_shard: int) -> None:
        self.target, self._config = target, config
        # One fixed name, so that what a killed export left is found and removed.
        self._aside = target.parent / f".{target.name}.tmp"
        shards: list[list[Entry]] = [[]]
        size = 0
        for entry in entries:
            if shards[-1] and size + entry.nbytes > max_shard:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += entry.nbytes
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self._shards = dict(zip(names if count > 1 else ["model.safetensors"], shards, strict=True))
        self._file_of = {entry.name: file for file, shard in self._shards.items() for entry in shard}
        self._owner = {file: i % world_size() for i, file in enumerate(self._shards)}
        self._open: dict[str, ShardFile] = {}
        self.total = sum(entry.nbytes for entry in entries)
        self._error: str | None = None

    def __enter__(self) -> "FolderWriter":
        self._on_rank_0(self._prepare)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        for file in self._open.values():
            file.close()
        if rank() == 0:
            if kind is not None:
                _finish_swap(self.target)
            shutil.rmtree(self._aside, ignore_errors=True)

    def writer_of(self, name: str) -> int:
        """The rank that writes the file of a tensor."""
        return self._owner[self._file_of[name]]

    def write(self, name: str, tensor: Tensor) -> None:
        """One tensor of a file of this rank. A failure waits for ``finish``: others may be sending to this rank."""
        if self._error is not None:
            return
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = ShardFile(self._aside / file, self._shards[file])
            self._open[file].write(name, tensor)
        except OSError as failure:
            self._error = _reason(failure)

    def fail(self, reason: str) -> None:
        """Remembers that this rank cannot give what it should write."""
        self._error = self._error or reason

    def finish(self) -> None:
        """Index and config.json, then the new name.

        Raises:
            CheckpointError: on every rank, when anything failed on any.
        """
        missing = [name for file in self._open.values() for name in file.missing]
        assert self._error or not missing, f"never written: {missing[:3]}"
        for error in gather_objects(self._error):
            if error is not None:
                raise self._failure(error)
        self._on_rank_0(self._publish)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        error = None
        if rank() == 0:
            try:
                action()
            except (OSError, CheckpointError) as failure:
                error = _reason(failure)
        error = broadcast_object(error)
        if error is not None:
            raise self._failure(error)

    def _failure(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.target}: the export failed and nothing there was changed: {reason.rstrip('.')}.")

    def _prepare(self) -> None:
        target = self.target
        _finish_swap(target)
        if target.exists() and not target.is_dir():
            raise CheckpointError("it is a file; give a folder")
        if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
            raise CheckpointError("the folder holds other files and no config.json; give a new or empty folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < self.total:
            raise CheckpointError(f"{self.total / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free on the disk")
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir()

    def _publish(self) -> None:
        if len(self._shards) > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(self._file_of.items()))}
            _write_json(self._aside / "model.safetensors.index.json", index)
        _write_json(self._aside / "config.json", self._config)
        _sync(self._aside)
        _swap(self._aside, self.target)


def _reason(failure: Exception) -> str:
    return failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _swap(new: Path, target: Path) -> None:
    if target.exists():
        os.rename(target, _old(target))
    os.rename(new, target)
    _finish_swap(target)
    _sync(target.parent)


def _finish_swap(target: Path) -> None:
    """Brings a swap to its end, also one that a crash cut in two: the earlier export goes back or away."""
    old = _old(target)
    if not old.exists():
        return
    if not target.exists():
        os.rename(old, target)
        return
    for file in old.iterdir():
        if not _OWN_FILES.match(file.name):
            os.rename(file, target / file.name)
    shutil.rmtree(old)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
