"""The tensor part of a checkpoint in torch's DCP format, read without executing anything.

DCP keeps its index in a pickle. Ours is read by an unpickler that knows the few classes an index consists of, and
is checked before it is used. Tensors are read with ``weights_only``; there are no bytes items.
"""

import math
import pickle
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_moe.checkpoint.state import local_elements
from titan_moe.distributed import local_box, rank, world_size
from titan_moe.errors import CheckpointError

METADATA = ".metadata"
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


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write this rank's part, flushed to the disk; every rank calls it.

    Raises:
        CheckpointError: on every rank, when writing failed on any.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=_Writer(folder), planner=_SavePlanner(), no_dist=world_size() == 1)
    except CheckpointException as error:
        raise CheckpointError(f"writing {folder} failed: {_first_failure(error)}") from error


def own_files(folder: Path) -> list[Path]:
    """The files that this rank wrote, the index among rank 0's."""
    return [*sorted(folder.glob(f"__{rank()}_*")), *([folder / METADATA] if rank() == 0 else [])]


def read_index(folder: Path, sizes: dict[str, int]) -> dict[str, dcp_metadata.TensorStorageMetadata]:
    """Shapes, dtypes and chunks by name, checked.

    Args:
        folder: the checkpoint.
        sizes: bytes of each of its files.

    Raises:
        CheckpointError: when the index is not one, or points outside the files or the tensors.
    """
    return _Reader(folder, sizes).read_metadata().state_dict_metadata


def read_tensors(folder: Path, sizes: dict[str, int], tensors: dict[str, torch.Tensor]) -> None:
    """Fill ``tensors`` in place, whatever their sharding; every rank calls it with the same sharded names.

    Raises:
        CheckpointError: on every rank, when reading failed on any.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # A copy of the dict: DCP puts its own objects back into the one it is given.
            reader, planner = _Reader(folder, sizes), _Planner(allow_partial_load=False)
            dcp.load(dict(tensors), storage_reader=reader, planner=planner, no_dist=world_size() == 1)
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} failed: {_first_failure(error)}") from error


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> dcp_metadata.StorageMeta:
        # The default records the absolute path of the temporary folder, as a pathlib object.
        return dcp_metadata.StorageMeta()


class _SavePlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        """The default plan, after checking that it puts every part where it belongs."""
        _check_places(self.state_dict)
        return super().create_local_plan()


def _check_places(tensors: dict[str, Any]) -> None:
    """Refuses what DCP would write to, or read from, the wrong place: uneven pieces of uneven pieces.

    Raises:
        CheckpointError: torch's own idea of this rank's part is not where the part lies.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        mesh, place = tensor.device_mesh, local_box(tensor)
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        elements = math.prod(place[1])
        fits = math.prod(sizes) == elements and (elements == 0 or (offsets, sizes) == place)
        if not fits or elements != local_elements(tensor):
            axes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
            raise CheckpointError(
                f"{name} of shape {list(tensor.shape)} is cut unevenly over {axes} and cannot be saved or loaded yet: "
                "choose degrees that divide its dims, such as an expert_parallel_degree that divides num_experts"
            )


class _Planner(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        """The default plan, after checking that it fills every element this rank holds."""
        _check_places(self.original_state_dict)
        plan = super().create_local_plan()
        planned: dict[str, int] = {}
        for item in plan.items:
            planned[item.dest_index.fqn] = planned.get(item.dest_index.fqn, 0) + math.prod(item.lengths)
        for name, tensor in self.original_state_dict.items():
            if planned.get(name, 0) != local_elements(tensor):
                raise CheckpointError(
                    f"{name}: the file holds {planned.get(name, 0)} of {local_elements(tensor)} values"
                )
        return plan


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


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        super().__init__(folder)
        self._sizes = sizes

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            _check_index(metadata, self._sizes)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path} is refused: {error}") from error
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        return metadata


def _check_index(metadata: Any, sizes: dict[str, int]) -> None:
    if not isinstance(metadata, dcp_metadata.Metadata):
        raise CheckpointError("it does not hold an index")
    stored_bytes = sum(sizes.values())
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            raise CheckpointError(f"{name!r} is not a tensor")
        if (
            any(length < 0 for length in entry.size)
            or math.prod(entry.size) * entry.properties.dtype.itemsize > stored_bytes
        ):
            raise CheckpointError(f"{name} of shape {list(entry.size)} is larger than all files together")
        elements = 0
        for chunk in entry.chunks:
            bounds = list(zip(chunk.offsets, chunk.sizes, entry.size, strict=True))
            if any(offset < 0 or size < 0 or offset + size > full for offset, size, full in bounds):
                raise CheckpointError(f"a chunk of {name} lies outside its shape {list(entry.size)}")
            if dcp_metadata.MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise CheckpointError(f"a chunk of {name} is in no file")
            elements += math.prod(chunk.sizes)
        if elements != math.prod(entry.size):
            raise CheckpointError(f"the chunks of {name} have {elements} values instead of {math.prod(entry.size)}")
    for index, place in metadata.storage_data.items():
        size = sizes.get(place.relative_path)
        if size is None or place.offset < 0 or place.length < 0 or place.offset + place.length > size:
            raise CheckpointError(
                f"{index.fqn} is said to lie in {place.relative_path!r}, outside the checkpoint's files"
            )


def _first_failure(error: CheckpointException) -> str:
    failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    where = f"rank {failed}: " if world_size() > 1 else ""
    return where + (str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}")
