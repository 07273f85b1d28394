"""Process-group helpers that also work without a group, as in a single-process run."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

_PATIENT = "patient"


def is_distributed() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Rank in the world: from the group, or from ``RANK`` before one exists, or 0."""
    return dist.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes in the world: from the group, or from ``WORLD_SIZE`` before one exists, or 1."""
    return dist.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Rank within this machine, which is also the index of this process's device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_process_group(device_type: str, timeout_seconds: float) -> None:
    """Join the world described by the launcher's environment variables, or a world of one without them.

    CPU tensors travel over gloo on every device type, so object collectives and checkpoints never touch the GPU.

    Args:
        device_type: ``cpu`` or ``cuda``. On ``cuda`` the current device becomes ``local_rank()``.
        timeout_seconds: limit of one collective; ``set_timeout`` changes it later.
    """
    timeout = timedelta(seconds=timeout_seconds)
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def timeout_seconds(group: dist.ProcessGroup | None = None) -> float:
    """Timeout of a group (default: the world), in seconds."""
    group = group or dist.group.WORLD
    options = group._get_backend(group._device_types[0]).options
    # The fake backend, whose collectives do nothing, has no options.
    return distributed_c10d.default_pg_timeout.total_seconds() if options is None else options._timeout.total_seconds()


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group this rank belongs to, those of meshes included."""
    return [group for group in distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]


def set_timeout(seconds: float) -> None:
    """Set the timeout of every existing group but ``patient_group``'s. Call it again after creating one.

    Does nothing without a group.
    """
    if is_distributed() and dist.get_backend() != "fake":
        for group in all_groups():
            if group.group_desc != _PATIENT:
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def patient_group(seconds: float) -> dist.ProcessGroup | None:
    """A gloo group of the whole world, for work beside the training; its timeout stays ``seconds``.

    All ranks call it at the same point. None in a world of one.
    """
    if world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds), group_desc=_PATIENT)


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum ``tensor`` in place over all ranks and return it; without a group, return it as it is."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """Take the maximum of ``tensor`` in place over all ranks and return it."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The picklable ``value`` of every rank, in rank order, on every rank; ``group`` is one of the whole world."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's picklable ``value``, on every rank; ``group`` is one of the whole world."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def local_box(tensor: DTensor, coordinate: Sequence[int] | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(offsets, sizes)`` of this rank's part within the full tensor, or of the rank at ``coordinate`` of its mesh.

    FSDP cuts what the other axes have left, though its axis comes first; DTensor says so with a strided shard.
    So the plain shards apply first and the strided ones last. torch's own offsets apply them in mesh order, and are
    wrong for strided shards of uneven size. An empty part lies at the end of its neighbours.
    """
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate() if coordinate is None else coordinate
    axes = list(zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True))
    for strided in (False, True):
        for parts, index, placement in axes:
            dim = getattr(placement, "dim", None)
            if dim is None or hasattr(placement, "split_factor") != strided:
                continue
            # torch.chunk's rule: equal pieces, the last one shorter, then empty ones.
            piece = -(-sizes[dim] // parts)
            start = min(index * piece, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(piece, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def in_backward() -> bool:
    """Whether the caller runs inside a backward pass, as the recomputation of a checkpointed forward does."""
    return torch._C._current_graph_task_id() != -1


def destroy() -> None:
    """Leave the world, if there is one."""
    if is_distributed():
        dist.destroy_process_group()
