"""Weight gradients of both linears: for each expert the product of its rows' left and right factors.

    dW[e] = sum over rows r of e: left[r] (scale_r right[r])^T        db[e] = sum over rows r of e: (weight_r) left[r]

left ``[R or T, M]``, right ``[R or T, N]`` -> dW ``[E, M, N]``, db ``[E, M]``. Either factor may be read through the
map, so that neither x nor the output's gradient is expanded to rows. dW2 takes do (gathered) and sa; dW1 takes dz and
x (gathered). Reads R(M + N) elements once per block of the other side, mostly from the cache, and writes EMN. An
expert without rows gets exact zeros; with ``into``, the product is added to fp32 main gradients in place.
"""

import torch
from torch import Tensor

from titan_moe.kernels.grouped_mm import column_sums, grouped_mm
from titan_moe.kernels.language import dot, rounded, tl, triton
from titan_moe.kernels.launch import block, launch
from titan_moe.kernels.library import operator


@triton.jit
def _wgrad_kernel(
    left,
    right,
    weights,
    slot_of,
    offsets,
    dw,
    db,
    M,
    N,
    slots_per_token,
    GATHER_LEFT: tl.constexpr,
    GATHER_RIGHT: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGH_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    blocks_m = tl.cdiv(M, BM)
    blocks_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    e = pid // (blocks_m * blocks_n)
    m = (pid // blocks_n % blocks_m) * BM + tl.arange(0, BM)
    block_n = pid % blocks_n
    n = block_n * BN + tl.arange(0, BN)
    end = tl.load(offsets + e)
    first = tl.load(offsets + e - 1, e > 0, other=0)
    acc = tl.zeros([BM, BN], ACC)
    sums = tl.zeros([BM], ACC)
    for r in range(first, end, BK):
        row = r + tl.arange(0, BK)
        used = row < end
        slot = row
        if HAS_SLOTS:
            slot = tl.load(slot_of + row, used, other=0)
            used = used & (slot >= 0)
        token = slot // slots_per_token if HAS_SLOTS else slot
        left_row = token if GATHER_LEFT else row
        right_row = token if GATHER_RIGHT else row
        # Both sides are masked: a row past the group may hold NaN, and 0 x NaN is NaN.
        a = tl.load(left + left_row.to(tl.int64)[:, None] * M + m[None, :], used[:, None] & (m < M)[None, :], other=0.0)
        b = tl.load(
            right + right_row.to(tl.int64)[:, None] * N + n[None, :], used[:, None] & (n < N)[None, :], other=0.0
        )
        if SCALE or WEIGH_BIAS:
            weight = tl.load(weights + slot.to(tl.int64), used, other=0.0).to(ACC)[:, None]
        if SCALE:
            b = rounded(b.to(ACC) * weight, b.dtype)
        acc = dot(tl.trans(a), b, acc)
        if HAS_BIAS:
            wide = a.to(ACC)
            sums += tl.sum(wide * weight if WEIGH_BIAS else wide, 0)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = dw + e.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    if ADD:
        acc += tl.load(at, inside, other=0.0).to(ACC)
    tl.store(at, rounded(acc, dw.dtype.element_ty), inside)
    if HAS_BIAS:
        if block_n == 0:
            tl.store(db + e.to(tl.int64) * M + m, rounded(sums, db.dtype.element_ty), m < M)


def _reference(
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    slot_of: Tensor | None,
    offsets: Tensor,
    slots_per_token: int,
    gather_left: bool,
    gather_right: bool,
    scale: bool,
    bias: bool,
    weigh_bias: bool,
    into: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if slot_of is not None and (gather_left or gather_right):
        token_of = slot_of if slots_per_token == 1 else slot_of.div(slots_per_token, rounding_mode="floor")
        left = left.index_select(0, token_of) if gather_left else left
        right = right.index_select(0, token_of) if gather_right else right
    if scale or (bias and weigh_bias):
        weights = weights.flatten() if slot_of is None else weights.flatten().index_select(0, slot_of)
    if scale:
        right = (right * weights.unsqueeze(1)).to(right.dtype)
    dw = grouped_mm(left.t(), right, offsets)
    db = column_sums(left, weights if weigh_bias else None, offsets) if bias else left.new_empty(0)
    if into is None:
        return dw, db
    into += dw
    return left.new_empty(0), db


def _kernels(
    left, right, weights, slot_of, offsets, slots_per_token, gather_left, gather_right, scale, bias, weigh_bias, into
):
    E, M, N = offsets.shape[0], left.shape[1], right.shape[1]
    dw = left.new_empty(E, M, N) if into is None else into
    db = left.new_empty(E, M) if bias else left.new_empty(0)
    b = block("wgrad", left)
    launch(
        _wgrad_kernel,
        E * -(-M // b.m) * -(-N // b.n),
        *(left.contiguous(), right.contiguous(), weights.contiguous(), slot_of, offsets, dw, db),
        *(M, N, slots_per_token),
        GATHER_LEFT=gather_left,
        GATHER_RIGHT=gather_right,
        HAS_SLOTS=slot_of is not None,
        SCALE=scale,
        HAS_BIAS=bias,
        WEIGH_BIAS=weigh_bias and bias,
        ADD=into is not None,
        ACC=tl.float64 if left.dtype == torch.float64 else tl.float32,
        **b.meta,
    )
    return dw if into is None else left.new_empty(0), db


wgrad = operator(
    "wgrad(Tensor left, Tensor right, Tensor weights, Tensor? slot_of, Tensor offsets, int slots_per_token, "
    "bool gather_left, bool gather_right, bool scale, bool bias, bool weigh_bias, Tensor(a!)? into) "
    "-> (Tensor, Tensor)",
    _reference,
    _kernels,
)
