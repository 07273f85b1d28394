"""The gradient norm over any mixture of plain tensors and DTensors, in one all-reduce and no host sync."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.distributed import all_reduce_max, all_reduce_sum, world_size


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    pp: int = 1,
    copies: Mapping[Tensor, int] | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``.

    Each rank adds up its local powers, divided by the number of ranks that hold the same part, and one all-reduce
    over the world gives the exact sum, whatever meshes the parameters live on and however many stages there are.

    Args:
        parameters: those of this rank whose ``grad`` is not None take part. A gradient's mesh holds the ranks of
            one pipeline stage or fewer; the ranks that its mesh leaves out hold the same as those in it.
        max_norm: limit; 0 or less only measures. A norm that is not finite makes gradients not finite too.
        pp: pipeline stages that the world is divided into; each has parameters of its own.
        copies: of a parameter that several pipeline stages hold, how many there are, each with the whole gradient.
        norm_type: 1 or more; ``inf`` takes the largest magnitude.

    Returns:
        the norm before clipping: 0-d, float64, the same on every rank.
    """
    parameters, copies = list(parameters), copies or {}
    stage_ranks, remainder = divmod(world_size(), pp)
    assert not remainder, f"{pp} pipeline stages do not divide {world_size()} ranks"
    locals_by_kind: dict[tuple[torch.dtype, float], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local, parts = _local(parameter.grad)
            if local.numel():
                locals_by_kind[local.dtype, stage_ranks / parts * copies.get(parameter, 1)].append(local)
    device = _local(parameters[0])[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (dtype, holders), tensors in locals_by_kind.items():
        norms = torch._foreach_norm(tensors, norm_type, dtype=torch.promote_types(dtype, torch.float32))
        norms = torch.stack(norms).double()
        total = torch.maximum(total, norms.max()) if norm_type == inf else total + norms.pow(norm_type).sum() / holders
    if norm_type == inf:
        # A maximum over ranks may drop NaN, but not infinity.
        norm = all_reduce_max(total.masked_fill(total.isnan(), inf))
    else:
        norm = all_reduce_sum(total).pow(1 / norm_type)
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (dtype, _), tensors in locals_by_kind.items():
            torch._foreach_mul_(tensors, factor.to(torch.promote_types(dtype, torch.float32)))
    return norm


def _local(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of ``tensor``, sharing its memory, and the number of parts that the whole is cut into."""
    if not isinstance(tensor, DTensor):
        return tensor, 1
    assert not any(placement.is_partial() for placement in tensor.placements), (
        f"gradient of shape {tuple(tensor.shape)} is not reduced: {tensor.placements}"
    )
    parts = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return tensor.to_local(), parts
