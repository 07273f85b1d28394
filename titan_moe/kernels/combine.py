"""Sum the rows of each token: Y ``[R, D]`` -> O ``[T, D]``.

A plain sum in the order of k, accumulated in fp32 (fp64 for fp64), with another addend on top where given. Reads TKD
and writes TD elements, the minimum of a deterministic sum; saves indices only. Its backward is a gather (``permute``),
whose backward is this op. The kernel reduces the partial gradients of the routing weights on the way, since they are
found through the same indices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.language import rounded, tl, triton
from titan_moe.kernels.launch import launch
from titan_moe.kernels.library import operator
from titan_moe.kernels.route_map import RouteMap


@triton.jit
def _combine_kernel(
    y,
    row_of,
    addend,
    partials,
    out,
    dweights,
    T,
    K,
    D,
    R,
    PARTS,
    ADD: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    ACC: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    blocks_d = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    # Rows are scattered, columns are not: the programs of one block of tokens follow each other.
    t = (pid // blocks_d) * BT + tl.arange(0, BT)
    d = (pid % blocks_d) * BD + tl.arange(0, BD)
    at = t.to(tl.int64)[:, None] * D + d[None, :]
    inside = (t < T)[:, None] & (d < D)[None, :]
    acc = tl.zeros([BT, BD], ACC)
    for k in range(K):
        row = tl.load(row_of + t.to(tl.int64) * K + k, t < T, other=R - 1)
        used = row < R - 1
        acc += tl.load(y + row.to(tl.int64)[:, None] * D + d[None, :], inside & used[:, None], other=0.0).to(ACC)
        if HAS_PARTIALS:
            if pid % blocks_d == 0:
                dw = tl.zeros([BT], ACC)
                for i in range(PARTS):
                    dw += tl.load(partials + row.to(tl.int64) * PARTS + i, used, other=0.0).to(ACC)
                tl.store(dweights + t.to(tl.int64) * K + k, rounded(dw, dweights.dtype.element_ty), t < T)
    if ADD:
        acc += tl.load(addend + at, inside, other=0.0).to(ACC)
    tl.store(out + at, rounded(acc, out.dtype.element_ty), inside)


def _reference(y: Tensor, row_of: Tensor, addend: Tensor | None, partials: Tensor | None) -> tuple[Tensor, Tensor]:
    dweights = y.new_empty(0) if partials is None else sum_weights(partials, row_of)
    if row_of.numel() == 0 or y.numel() == 0:
        out = y.new_zeros(row_of.shape[0], y.shape[1])
        return out if addend is None else out + addend, dweights
    out = F.embedding_bag(row_of, y, mode="sum")
    return out if addend is None else out.add_(addend), dweights


def _kernels(y: Tensor, row_of: Tensor, addend: Tensor | None, partials: Tensor | None) -> tuple[Tensor, Tensor]:
    (R, D), (T, K) = y.shape, row_of.shape
    out = y.new_empty(T, D)
    parts = 0 if partials is None else partials.shape[1]
    dweights = y.new_empty(0) if partials is None else partials.new_empty(T, K)
    block_t = 4
    block_d = min(triton.next_power_of_2(D), 1024 if y.element_size() == 2 else 512)
    launch(
        _combine_kernel,
        -(-T // block_t) * -(-D // block_d),
        *(y.contiguous(), row_of.contiguous(), addend, partials, out, dweights, T, K, D, R, parts),
        ADD=addend is not None,
        HAS_PARTIALS=parts > 0,
        ACC=tl.float64 if y.dtype == torch.float64 else tl.float32,
        BT=block_t,
        BD=block_d,
        num_warps=4,
    )
    return out, dweights


_combine = operator(
    "combine(Tensor y, Tensor row_of, Tensor? addend, Tensor? partials) -> (Tensor, Tensor)", _reference, _kernels
)


def sum_rows(y_RD: Tensor, row_of_TK: Tensor, addend_TD: Tensor | None = None) -> Tensor:
    """``out[t] = sum_k y[row_of[t, k]] + addend[t]`` in the order of k. Not differentiable.

    Slots without an expert point at the last row, which must be zero.
    """
    return _combine(y_RD, row_of_TK, addend_TD, None)[0]


def sum_rows_and_weights(dx_RD: Tensor, row_of_TK: Tensor, partials_RN: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_rows``, and the gradient ``[T, K]`` of the routing weights from its N partial sums per row."""
    return _combine(dx_RD, row_of_TK, None, partials_RN)


def sum_weights(partials_RN: Tensor, row_of_TK: Tensor) -> Tensor:
    """The second result of ``sum_rows_and_weights`` alone."""
    sums_R = partials_RN.sum(1)
    sums_R[-1:].zero_()
    return sums_R.index_select(0, row_of_TK.flatten()).view(row_of_TK.shape)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row_of, slot_of, slots_per_token):
        ctx.save_for_backward(slot_of)
        ctx.slots_per_token = slots_per_token
        return sum_rows(y, row_of)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        (slot_of,) = ctx.saved_tensors
        return do.index_select(0, slot_of.div(ctx.slots_per_token, rounding_mode="floor")), None, None, None


def combine(y_RD: Tensor, route_map: RouteMap) -> Tensor:
    """Sum each token's rows. The last row of ``y_RD`` must be zero (see ``RouteMap``)."""
    return _Combine.apply(y_RD, route_map.row_of_TK, route_map.slot_of_R, route_map.slots_per_token)
