"""What a rank holds of each tensor, free of meshes: a box within the whole tensor."""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from titan_moe.distributed import local_box
from titan_moe.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """``local`` lies at ``offsets`` within a tensor of ``shape``. Ranks may hold the same part, or none of it."""

    local: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def counts(self) -> bool:
        """Whether there is anything to save or load: not for a rank that has nothing of a tensor that has values."""
        return self.local.numel() > 0 or math.prod(self.shape) == 0


def parts_of_rank(tensors: dict[str, torch.Tensor]) -> dict[str, Part]:
    """This rank's parts, sharing memory with ``tensors``.

    The box is worked out from the placements as ``local_box`` does, and not as torch does: torch applies strided
    shards in mesh order, and puts uneven ones in the wrong place.

    Raises:
        CheckpointError: a part does not have the shape of its box, so nobody knows where it lies.
    """
    return {name: _part_of(name, tensor) for name, tensor in tensors.items()}


def _part_of(name: str, tensor: torch.Tensor) -> Part:
    if not isinstance(tensor, DTensor):
        return Part(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    local, (offsets, sizes) = tensor.to_local(), local_box(tensor)
    if tuple(local.shape) != sizes and (local.numel() or math.prod(sizes)):
        mesh = tensor.device_mesh
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        raise CheckpointError(
            f"{name} of shape {list(tensor.shape)} over {axes} with {list(tensor.placements)}: this rank holds "
            f"{list(local.shape)} where {list(sizes)} were expected, so it cannot be saved or loaded; "
            "choose degrees that divide its dims"
        )
    return Part(local, offsets, tuple(tensor.shape))
