"""Gather token rows into expert order: x ``[T, D]`` -> rows ``[R, D]``.

Writes RD elements and reads TD to RD; saves indices only. Backward is the fixed-order sum of ``combine``. Only the loop
over experts needs it: the fused products gather as they read.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.combine import sum_rows
from titan_moe.kernels.route_map import RouteMap


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row_of, token_of):
        ctx.save_for_backward(row_of)
        return x.index_select(0, token_of)

    @staticmethod
    @once_differentiable
    def backward(ctx, drows):
        (row_of,) = ctx.saved_tensors
        drows = drows.clone(memory_format=torch.contiguous_format)
        drows[-1:].zero_()  # the spare row, see RouteMap
        return sum_rows(drows, row_of), None, None


def permute(x_TD: Tensor, route_map: RouteMap) -> Tensor:
    """Rows of x in expert order. Rows past the last offset hold some token; their gradient is not read."""
    return _Permute.apply(x_TD, route_map.row_of_TK, route_map.token_of_R)
