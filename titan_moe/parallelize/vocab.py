"""Embedding and head with the vocabulary shared over the tp axis. The loss on such logits is in ``models/loss.py``."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_moe.parallelize.crossing import to_dtensor


def first_row(size: int, tp: DeviceMesh) -> int:
    """First token id of this rank; ids are shared out as ``torch.chunk`` does, the last ranks having fewer."""
    return min(tp.get_local_rank() * -(-size // tp.size()), size)


def embed(module: nn.Embedding, ids: Tensor, tp: DeviceMesh, size: int) -> Tensor:
    """This rank's part of the embeddings ``[..., D]``, to be summed over tp: zero where another rank has the row.

    Args:
        module: whose ``weight`` is this rank's rows.
        ids: any shape, the same on all ranks.
        tp: the tp axis.
        size: rows of the whole embedding.

    Raises:
        IndexError: from torch, on an id outside the vocabulary (on the CPU).
    """
    weight = module.weight
    rows, first = weight.shape[0], first_row(size, tp)
    if rows == 0:
        # A sum over nothing keeps the weight in the graph.
        return weight.sum() + weight.new_zeros(*ids.shape, weight.shape[1])
    mine = (ids >= first) & (ids < first + rows)
    own_padding = module.padding_idx is not None and first <= module.padding_idx < first + rows
    padding = module.padding_idx - first if own_padding else None
    # Ids of other ranks point at row 0; those outside the vocabulary still fail.
    outside = (ids < 0) | (ids >= size)
    local = (ids - first).masked_fill(~mine & ~outside, 0).masked_fill(outside, size)
    return F.embedding(local, weight, padding).masked_fill(~mine[..., None], 0)


def head(inner: Callable[[Tensor], Tensor], x: Tensor, tp: DeviceMesh, size: int) -> DTensor:
    """Logits ``[..., V]`` as a DTensor, of which this rank computes its own vocabulary.

    Args:
        inner: the linear with this rank's rows.
        x: all tokens ``[..., D]``.
        tp: the tp axis.
        size: V.
    """
    return to_dtensor(inner(x), tp, [Shard(x.ndim - 1)], (*x.shape[:-1], size))
