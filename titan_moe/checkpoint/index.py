"""A checkpoint's index: which tensors there are, cut into which chunks, stored where.

DCP keeps it in a pickle, ``.metadata``. Ours is read by an unpickler that knows the few classes an index consists of,
and is checked before it is used.
"""

import io
import math
import pickle
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from titan_moe.errors import CheckpointError

METADATA = ".metadata"
_PAIRS_AT_ONCE = 1 << 22
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def parse_index(content: bytes, path: str, sizes: dict[str, int]) -> Metadata:
    """Shapes, dtypes and chunks by name, checked.

    Args:
        content: of the file.
        path: for errors.
        sizes: bytes of each of the checkpoint's files.

    Raises:
        CheckpointError: when it is not an index, asks for code, or points outside the files or the tensors.
    """
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        _check(metadata, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return metadata


def _enum_member(kind: Any, name: str) -> Any:
    """What ``getattr`` may do in an index: Python 3.11.2 writes the members of an enum that way."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise CheckpointError("it asks for builtins.getattr, which an index never needs; do not trust this file")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise CheckpointError(f"it asks for {module}.{name}, which an index never needs; do not trust this file")

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError("it holds a persistent object, which an index never needs; do not trust this file")


def _check(metadata: Any, sizes: dict[str, int]) -> None:
    if not isinstance(metadata, Metadata):
        raise CheckpointError("it does not hold an index")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{name!r} is not a tensor")
        _check_tensor(name, entry, metadata, sum(sizes.values()))
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for index, place in metadata.storage_data.items():
        size = sizes.get(place.relative_path)
        if size is None or not 0 <= place.offset <= place.offset + place.length <= size:
            raise CheckpointError(
                f"{index.fqn} is said to lie in {place.relative_path!r}, outside the checkpoint's files"
            )
        if place.transform_descriptors:
            raise CheckpointError(f"{index.fqn} is said to be stored transformed, which this program never does")
        by_file.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
    for file, places in by_file.items():
        places.sort()
        for (offset, length, name), (following, _, other) in pairwise(places):
            if following < offset + length:
                raise CheckpointError(f"{name} and {other} are said to lie in the same bytes of {file}")


def _check_tensor(name: str, entry: TensorStorageMetadata, metadata: Metadata, stored_bytes: int) -> None:
    shape = list(entry.size)
    if any(length < 0 for length in shape) or math.prod(shape) * entry.properties.dtype.itemsize > stored_bytes:
        raise CheckpointError(f"{name} of shape {shape} is larger than all files together")
    elements = 0
    for chunk in entry.chunks:
        bounds = list(zip(chunk.offsets, chunk.sizes, shape, strict=True))
        if any(offset < 0 or size < 0 or offset + size > full for offset, size, full in bounds):
            raise CheckpointError(f"a chunk of {name} lies outside its shape {shape}")
        if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
            raise CheckpointError(f"a chunk of {name} is in no file")
        elements += math.prod(chunk.sizes)
    if elements != math.prod(shape):
        raise CheckpointError(f"the chunks of {name} have {elements} values instead of {math.prod(shape)}")
    if _overlap(entry.chunks):
        raise CheckpointError(f"chunks of {name} overlap, so that others of its values are nowhere")


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether any two chunks share a value."""
    n = len(chunks)
    if n < 2:
        return False
    low = torch.tensor([list(chunk.offsets) for chunk in chunks])
    high = low + torch.tensor([list(chunk.sizes) for chunk in chunks])
    rows = max(1, _PAIRS_AT_ONCE // n)
    for first in range(0, n, rows):
        a_low, a_high = low[first : first + rows, None], high[first : first + rows, None]
        # A chunk shares values with itself alone, and an empty one with none.
        shared = ((a_low < high) & (low < a_high)).all(-1)
        own = (a_low < a_high).all(-1)
        if shared.sum() != own.sum():
            return True
    return False
