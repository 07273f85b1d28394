"""Rows of each group times the matrix of the group, the plain product that ``down`` and ``up_dgrad`` share.

    out[r] = (scale_r) A[r] B[e] + (weight_r) bias[e]

A ``[R, K]``, B ``[E, K, N]`` in any layout -> ``[R, N]``. Reads RK elements of A once per block of columns (from the
cache), B once per tile of rows, and writes RN.
"""

import torch
from torch import Tensor

from titan_moe.kernels.language import dot, rounded, tl, triton
from titan_moe.kernels.launch import block, launch
from titan_moe.kernels.route_map import tiles_of


@triton.jit
def _rows_kernel(
    a,
    b,
    bias,
    weights,
    slot_of,
    offsets,
    tiles,
    out,
    K,
    N,
    stride_be,
    stride_bk,
    stride_bn,
    max_tiles,
    HAS_BIAS: tl.constexpr,
    WEIGH_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    GATHER: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    blocks_n = tl.cdiv(N, BN)
    tile = tl.program_id(0) // blocks_n
    e = tl.load(tiles + tile)
    if e < 0:
        return
    row = tl.load(tiles + max_tiles + tile) + tl.arange(0, BM)
    mine = row < tl.load(offsets + e)
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a + row.to(tl.int64)[:, None] * K + k[None, :]
    b_at = b + e.to(tl.int64) * stride_be + k[:, None] * stride_bk + n[None, :] * stride_bn
    acc = tl.zeros([BM, BN], ACC)
    for k0 in range(0, K, BK):
        if EVEN_K:
            rows = tl.load(a_at, mine[:, None], other=0.0)
            w = tl.load(b_at, (n < N)[None, :], other=0.0)
        else:
            rows = tl.load(a_at, mine[:, None] & (k < K - k0)[None, :], other=0.0)
            w = tl.load(b_at, (k < K - k0)[:, None] & (n < N)[None, :], other=0.0)
        acc = dot(rows, w, acc)
        a_at += BK
        b_at += BK * stride_bk

    if SCALE or WEIGH_BIAS:
        slot = row
        if GATHER:
            slot = tl.load(slot_of + row, mine, other=0)
        weight = tl.load(weights + slot.to(tl.int64), mine & (slot >= 0), other=0.0).to(ACC)[:, None]
    if SCALE:
        acc *= weight
    if HAS_BIAS:
        add = tl.load(bias + e.to(tl.int64) * N + n, n < N, other=0.0).to(ACC)[None, :]
        acc += add * weight if WEIGH_BIAS else add
    at = out + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, rounded(acc, out.dtype.element_ty), mine[:, None] & (n < N)[None, :])


def rows_gemm(
    a_RK: Tensor,
    b_EKN: Tensor,
    bias_EN: Tensor | None,
    weights: Tensor,
    slot_of_R: Tensor | None,
    offsets_E: Tensor,
    tiles: Tensor | None,
    *,
    weigh_bias: bool = False,
    scale: bool = False,
) -> Tensor:
    """Launch it. Rows past the last offset are undefined, without ``slot_of_R`` zero.

    Args:
        b_EKN: any strides.
        weights: routing weights by slot, or by row without ``slot_of_R``.
        weigh_bias: the bias times the routing weight.
        scale: the product times the routing weight.
    """
    (R, K), N = a_RK.shape, b_EKN.shape[2]
    out = (a_RK.new_zeros if slot_of_R is None else a_RK.new_empty)(R, N)
    tiles = tiles_of(offsets_E, R) if tiles is None else tiles
    shape = block("rows", a_RK)
    launch(
        _rows_kernel,
        tiles.shape[1] * -(-N // shape.n),
        *(a_RK.contiguous(), b_EKN, bias_EN, weights.contiguous(), slot_of_R, offsets_E, tiles, out),
        *(K, N, *b_EKN.stride(), tiles.shape[1]),
        HAS_BIAS=bias_EN is not None,
        WEIGH_BIAS=weigh_bias and bias_EN is not None,
        SCALE=scale,
        GATHER=slot_of_R is not None,
        EVEN_K=K % shape.k == 0,
        ACC=tl.float64 if a_RK.dtype == torch.float64 else tl.float32,
        **shape.meta,
    )
    return out
