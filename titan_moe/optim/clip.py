"""The gradient norm over any mixture of plain tensors and DTensors, in one all-reduce and no host sync."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from titan_moe.distributed import all_reduce_sum, world_size


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale all gradients in place so that their global 2-norm is at most ``max_norm``.

    Each rank adds up its local squares, divided by the number of copies of that shard (the replicate axes of a
    DTensor's mesh; the whole world for a plain tensor), and one all-reduce over the world gives the exact sum,
    whatever meshes the parameters live on.

    Args:
        parameters: those whose ``grad`` is not None take part.
        max_norm: limit; 0 or less only measures. A norm that is not finite makes gradients not finite too.

    Returns:
        the norm before clipping: 0-d, float64, the same on every rank.
    """
    parameters = list(parameters)
    locals_by_kind: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local, copies = _local(parameter.grad)
            if local.numel():
                locals_by_kind[local.dtype, copies].append(local)
    device = _local(parameters[0])[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (dtype, copies), tensors in locals_by_kind.items():
        norms = torch._foreach_norm(tensors, 2, dtype=torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum() / copies
    norm = all_reduce_sum(total).sqrt()
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (dtype, _), tensors in locals_by_kind.items():
            torch._foreach_mul_(tensors, factor.to(torch.promote_types(dtype, torch.float32)))
    return norm


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of ``tensor``, sharing its memory, and the number of ranks that hold the same part."""
    if not isinstance(tensor, DTensor):
        return tensor, world_size()
    assert not any(placement.is_partial() for placement in tensor.placements), (
        f"gradient of shape {tuple(tensor.shape)} is not reduced: {tensor.placements}"
    )
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return tensor.to_local(), math.prod(size for size, placement in axes if placement.is_replicate())
