"""Sum the rows of each token: Y ``[R, D]`` -> O ``[T, D]``.

A plain sum in the order of k, accumulated in fp32 (fp64 for fp64). Reads TKD and writes TD elements; saves indices
only. Its backward is a gather, whose backward is this op (see ``permute``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.route_map import RouteMap


def sum_rows(y_RD: Tensor, row_of_TK: Tensor) -> Tensor:
    """``out[t] = sum_k y[row_of[t, k]]`` in the order of k. Not differentiable."""
    if row_of_TK.numel() == 0:
        return y_RD.new_zeros(row_of_TK.shape[0], y_RD.shape[1])
    return F.embedding_bag(row_of_TK, y_RD, mode="sum")


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row_of, token_of):
        ctx.save_for_backward(token_of)
        return sum_rows(y, row_of)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        (token_of,) = ctx.saved_tensors
        return do.index_select(0, token_of), None, None


def combine(y_RD: Tensor, route_map: RouteMap) -> Tensor:
    """Sum each token's rows. The last row of ``y_RD`` must be zero (see ``RouteMap``)."""
    return _Combine.apply(y_RD, route_map.row_of_TK, route_map.token_of_R)
