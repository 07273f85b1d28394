"""The one way from DTensor to local compute and back; it always names where the gradient lives.

Wrong gradient placements at these crossings are the most common silent fault of this field: a plain ``to_local()``
of a weight that is replicated over ranks with different tokens gives each rank its own, wrong gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def to_local(tensor: Tensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    """The local part of ``tensor``; a plain tensor passes.

    Args:
        tensor: DTensor or plain.
        grad_placements: what the local gradient is, one per mesh axis: ``Partial()`` where ranks hold the same
            part but see different tokens; None: the gradient lies as the tensor does.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=grad_placements)


def to_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size | Sequence[int]
) -> DTensor:
    """The DTensor of global ``shape`` whose part on this rank is ``local``; uneven shards are fine.

    ``from_local`` alone guesses the global size from the local one, wrongly when it does not divide.
    """
    stride, numel = [], 1
    for size in reversed(shape):
        stride.append(numel)
        numel *= max(size, 1)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(reversed(stride))
    )


@contextmanager
def local_parameters(
    module: nn.Module, placements_of: Callable[[DTensor], Sequence[Placement] | None]
) -> Iterator[None]:
    """Within, the DTensor parameters of ``module`` (not of its children) are their local parts.

    Args:
        module: whose own parameters are swapped; plain ones stay.
        placements_of: gives each parameter's ``grad_placements``.
    """
    swapped = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    for name, parameter in swapped.items():
        module._parameters[name] = to_local(parameter, placements_of(parameter))
    try:
        yield
    finally:
        module._parameters.update(swapped)
