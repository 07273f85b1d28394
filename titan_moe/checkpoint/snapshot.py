"""A copy of what a rank holds, so that training may go on while it is written."""

import math
import shutil
from dataclasses import dataclass

import torch

from titan_moe.checkpoint.parts import Part
from titan_moe.errors import CheckpointError

_ALIGNMENT = 64
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Place:
    """Where in the block of a snapshot a part lies, and what it is."""

    start: int
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class Snapshot:
    """One block of host memory that every save uses again, once nothing reads the last one.

    Args:
        shared: another process is going to read it.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self.block = torch.empty(0, dtype=torch.uint8)

    def take(self, parts: dict[str, Part]) -> dict[str, Place]:
        """Copy ``parts``; when it returns they may change.

        Raises:
            CheckpointError: there is not enough memory that processes can share.
        """
        places, size = {}, 0
        for name, part in parts.items():
            local = part.local
            places[name] = Place(size, local.dtype, tuple(local.shape), part.offsets, part.shape)
            size = -(-(size + local.nbytes) // _ALIGNMENT) * _ALIGNMENT
        if size > self.block.numel():
            self.block = self._allocate(size)
        for name, view in views(self.block, places).items():
            view.local.copy_(parts[name].local, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return places

    def _allocate(self, size: int) -> torch.Tensor:
        if not self._shared:
            return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if free < size:
            raise CheckpointError(
                f"a snapshot of {size} bytes does not fit {_SHARED_MEMORY}, which has {free} left: "
                "enlarge it, or set checkpoint.async_mode to async"
            )
        # share_memory_() would copy what was never written.
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))


def views(block: torch.Tensor, places: dict[str, Place]) -> dict[str, Part]:
    """The parts in ``block``, sharing memory with it."""
    parts = {}
    for name, place in places.items():
        end = place.start + math.prod(place.local_shape) * place.dtype.itemsize
        local = block[place.start : end].view(place.dtype).view(place.local_shape)
        parts[name] = Part(local, place.offsets, place.shape)
    return parts
