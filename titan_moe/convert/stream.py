"""The weights of a checkpoint, written or read a few at a time; plain DCP files, as training writes them."""

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_moe.checkpoint import files, find_checkpoint
from titan_moe.checkpoint.index import METADATA, parse_index
from titan_moe.errors import CheckpointError

_CHUNK_BYTES = 1 << 27

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


def chunks_of(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """First and last row, exclusive, of the chunks that a tensor is stored in, of at most 128 MB where a row allows."""
    if not shape:
        yield 0, 1
        return
    step = max(1, _CHUNK_BYTES // max(1, prod(shape[1:]) * itemsize))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def write_weights(
    parent: Path,
    tensors: Tensors,
    read: Callable[[str, int, int], Tensor],
    extra: dict[str, Any],
    advance: Callable[[int], None] = lambda _: None,
) -> Path:
    """Writes the checkpoint ``step-0`` without an optimizer; complete or not there.

    Args:
        parent: where the folder goes; must not hold checkpoints.
        tensors: what to write, by the model's names.
        read: gives rows ``[first, end)`` of a tensor in memory of its own; of a 0-d one, the tensor.
        extra: what else ``state.json`` keeps.
        advance: told of the bytes written.

    Raises:
        CheckpointError: when it cannot be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    if files.step_folders(parent):
        raise CheckpointError(f"{parent}: holds checkpoints already. Give a new or empty folder.")
    temporary = files.new_folder(parent, 0)
    try:
        index = Metadata({}, storage_data={})
        with (temporary / "__0_0.distcp").open("wb") as file:
            for name, (shape, dtype) in tensors.items():
                _write_tensor(file, f"model.{name}", shape, dtype, lambda *rows, name=name: read(name, *rows), index)
                advance(prod(shape) * dtype.itemsize)
            _flush(file)
        with (temporary / METADATA).open("wb") as file:
            pickle.dump(index, file)
            _flush(file)
        about = {"step": 0, "world_size": 1, "has_optimizer": False, "without_optimizer_state": [], "extra": extra}
        files.write_json(temporary / files.STATE, about)
        entries = {path.name: files.checksum(path) for path in temporary.iterdir()}
        files.write_manifest(temporary, files.Manifest(step=0, serial=1, files=entries))
        files.publish(temporary, parent / "step-0")
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"writing {parent} failed: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return parent / "step-0"


def _write_tensor(
    file: Any,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: Callable[[int, int], Tensor],
    index: Metadata,
) -> None:
    chunks = []
    for first, end in chunks_of(shape, dtype.itemsize):
        offset, chunk = file.tell(), rows(first, end)
        torch.save(chunk, file)
        place = torch.Size([first, *(0 for _ in shape[1:])] if shape else [])
        chunks.append(ChunkStorageMetadata(place, chunk.shape))
        index.storage_data[MetadataIndex(key, place)] = _StorageInfo("__0_0.distcp", offset, file.tell() - offset)
    properties = TensorProperties(dtype=dtype)
    index.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)


class SavedWeights:
    """The model's tensors of one complete checkpoint, read one at a time.

    Args:
        path: a ``step-N`` folder, or a run's folder, whose newest complete checkpoint is taken.
        advance: told of the bytes whose checksums are verified.

    Attributes:
        tensors: shape and dtype by the model's names.
        extra: what else the checkpoint keeps, its configuration among it.

    Raises:
        CheckpointError: there is none, or a file of it does not have its checksum.
    """

    def __init__(self, path: str | Path, advance: Callable[[int], None] = lambda _: None) -> None:
        self.folder = find_checkpoint(path)
        manifest = files.read_manifest(self.folder)
        for name, entry in manifest.files.items():
            if files.checksum(self.folder / name) != entry:
                raise CheckpointError(f"{self.folder / name} is damaged: the checksum does not fit")
            advance(entry[0])
        sizes = {name: size for name, (size, _) in manifest.files.items()}
        content = files.read_checked(self.folder, manifest, METADATA)
        self._index = parse_index(content, str(self.folder / METADATA), sizes)
        self.extra: dict[str, Any] = files.read_json(self.folder / files.STATE).get("extra", {})
        self.tensors: Tensors = {
            key.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._index.state_dict_metadata.items()
            if key.startswith("model.")
        }

    def read(self, name: str) -> Tensor:
        """One tensor whole."""
        key, (shape, dtype) = f"model.{name}", self.tensors[name]
        out = torch.empty(shape, dtype=dtype)
        for chunk in self._index.state_dict_metadata[key].chunks:
            place = self._index.storage_data[MetadataIndex(key, chunk.offsets)]
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                stored = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
            if not isinstance(stored, Tensor) or (stored.shape, stored.dtype) != (chunk.sizes, dtype):
                raise CheckpointError(f"{key} in {self.folder / place.relative_path} is not what the index says")
            bounds = zip(chunk.offsets, chunk.sizes, strict=True)
            out[tuple(slice(offset, offset + size) for offset, size in bounds)] = stored
        return out


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
