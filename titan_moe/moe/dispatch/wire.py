"""Rows between ranks, with gradients that travel back the same way.

Everything a dispatcher of this package sends goes through the few ``torch.distributed`` calls here. Sums run over the
ranks in their order and are accumulated in fp32 (fp64 for fp64), whatever the backend's own reductions do.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.combine import sum_rows


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, spare: int = 0) -> Tensor:
    """One all-to-all. Not differentiable.

    Args:
        rows: ``[sum(send) or more, ...]``, ordered by destination; further rows stay here.
        send, receive: rows to and from each rank of the group.
        spare: zero rows to append to the result.
    """
    total = sum(receive)
    out = rows.new_empty(total + spare, *rows.shape[1:])
    dist.all_to_all_single(out[:total], rows[: sum(send)].contiguous(), receive, send, group=group)
    out[total:].zero_()
    return out


def all_gather(x: Tensor, rows: int, group: dist.ProcessGroup, fill: float = 0) -> Tensor:
    """The first dims of all ranks, each filled up to ``rows``, one after the other. Not differentiable."""
    if x.shape[0] < rows:
        x = torch.cat([x, x.new_full((rows - x.shape[0], *x.shape[1:]), fill)])
    out = x.new_empty(dist.get_world_size(group) * rows, *x.shape[1:])
    # The name since torch 2.13, and before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x.contiguous(), group=group)
    return out


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Split the first dim evenly over the ranks and sum what all ranks hold for this one. Not differentiable.

    Moves what a reduce-scatter moves, but the order of the sum is fixed and its accumulator wide.
    """
    parts = x.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    size = dist.get_world_size(group)
    return out.view(size, x.shape[0] // size, *x.shape[1:]).sum(0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index_R, row_of_TK):
        ctx.save_for_backward(row_of_TK)
        return x.index_select(0, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, drows):
        (row_of,) = ctx.saved_tensors
        if drows.dim() == 1:
            return drows.index_select(0, row_of.flatten()).view(row_of.shape).sum(1), None, None
        return sum_rows(drows.contiguous(), row_of), None, None


def gather_rows(x: Tensor, index_R: Tensor, row_of_TK: Tensor) -> Tensor:
    """``x[index_R]`` for ``x`` of one or two dims; backward sums each row's copies in the order of ``row_of_TK``.

    The last row of the gradient must be zero where ``row_of_TK`` points at it; ``swap`` makes it so.
    """
    return _Gather.apply(x, index_R, row_of_TK)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, send, receive, spare, group, *tensors):
        ctx.way = send, receive, group
        ctx.spare = [t.shape[0] - sum(send) for t in tensors]
        return tuple(exchange(t, send, receive, group, spare) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        send, receive, group = ctx.way
        # One node for all tensors: their collectives run in one order on every rank.
        return (
            None,
            None,
            None,
            None,
            *(
                exchange(g, receive, send, group, spare) if needed else None
                for g, spare, needed in zip(grads, ctx.spare, ctx.needs_input_grad[4:], strict=True)
            ),
        )


def swap(*tensors: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, spare: int = 0) -> tuple:
    """Differentiable ``exchange`` of several tensors alike. Rows that are not sent get a zero gradient."""
    return _Swap.apply(send, receive, spare, group, *tensors)


class _GatherRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group, *tensors):
        ctx.group, ctx.sizes = group, [t.shape[0] for t in tensors]
        return tuple(all_gather(t, rows, group) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return (
            None,
            None,
            *(
                scatter_sum(g, ctx.group)[:size] if needed else None
                for g, size, needed in zip(grads, ctx.sizes, ctx.needs_input_grad[2:], strict=True)
            ),
        )


def gather_ranks(*tensors: Tensor, rows: int, group: dist.ProcessGroup) -> tuple:
    """Differentiable ``all_gather`` of several tensors, filled with zeros; backward is ``scatter_sum``."""
    return _GatherRanks.apply(rows, group, *tensors)


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather(grad, grad.shape[0], ctx.group), None


def sum_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Differentiable ``scatter_sum``; backward is ``all_gather``."""
    return _SumRanks.apply(x, group)
