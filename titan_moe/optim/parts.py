"""This rank's parts of tensors, and tensors made of parts.

Updates are elementwise, so they work on parts. A state is made of parts too: DTensor would first derive the placements
of each shape, which makes a first step several times as long.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``local`` of each."""
    return {name: local(value) for name, value in tensors.items()}


def zeros_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros laid out as ``tensor`` is."""
    part = torch.zeros_like(local(tensor.detach()), dtype=dtype)
    if not isinstance(tensor, DTensor):
        return part
    return assembled(part, tensor, tensor.shape, tensor.stride())


def assembled(part: Tensor, like: DTensor, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """A tensor of ``shape`` and ``stride`` that is placed as ``like`` is, of which ``part`` is this rank's."""
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def around(part: Tensor, like: Tensor) -> Tensor:
    """``part`` laid out as ``like`` is, wherever ``part`` lies."""
    if not isinstance(like, DTensor):
        return part
    # ``from_local`` would move it to the device of the mesh.
    return DTensor(part, like._spec, requires_grad=False)
