"""Gradient through the second linear and the activation, from the gradient of the tokens' output.

    da = do[token_of] W2     dz = weight * da act'(z)     sa = weight * act(z)     dweight = <da, act(z)> + <do, b2>

do ``[T, D]``, W2 ``[E, D, F]``, z ``[R, nF]`` -> dz ``[R, nF]``, sa ``[R, F]`` (the operand of W2's gradient,
recomputed) and the gradient of the weights in fp32, ``[R, N]`` partial sums over N blocks of columns, reduced by
``combine``. The kernel reads do through the route map, TD to RD elements, and z once; it writes R(n + 1)F elements.
Saves nothing.

With the routing weight on the input, z holds u = x W1^T: dz is not weighted, sa = act(z), dweight = <dz, u>.
"""

import torch
from torch import Tensor

from titan_moe.kernels.activation import Activation, activation_backward, activation_backward_tile
from titan_moe.kernels.gather_up import preactivation
from titan_moe.kernels.grouped_mm import expert_of_rows, grouped_mm, unused_rows
from titan_moe.kernels.language import dot, rounded, tl, triton
from titan_moe.kernels.launch import block, launch
from titan_moe.kernels.library import operator
from titan_moe.kernels.route_map import tiles_of


@triton.jit
def _down_dgrad_kernel(
    do,
    w2,
    z,
    b1,
    b2,
    weights,
    slot_of,
    offsets,
    tiles,
    dz,
    sa,
    partials,
    D,
    F,
    slots_per_token,
    max_tiles,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_B1: tl.constexpr,
    HAS_B2: tl.constexpr,
    ON_INPUT: tl.constexpr,
    GATHER: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    GATED: tl.constexpr = KIND != "relu2"
    blocks_n = tl.cdiv(F, BN)
    tile = tl.program_id(0) // blocks_n
    block_n = tl.program_id(0) % blocks_n
    e = tl.load(tiles + tile)
    if e < 0:
        return
    row = tl.load(tiles + max_tiles + tile) + tl.arange(0, BM)
    mine = row < tl.load(offsets + e)
    slot = row
    if GATHER:
        slot = tl.load(slot_of + row, mine, other=0)
    used = mine & (slot >= 0)
    token = slot // slots_per_token if GATHER else slot
    n = block_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    do_row = do + token.to(tl.int64)[:, None] * D
    dweight = tl.zeros([BM], ACC)
    if HAS_B2:
        # In a loop of its own, so that the rows need not be in registers for both.
        if block_n == 0:
            for k0 in range(0, D, BK):
                inside = used[:, None] & (k < D - k0)[None, :]
                bias = tl.load(b2 + e.to(tl.int64) * D + k0 + k, k < D - k0, other=0.0).to(ACC)
                dweight += tl.sum(tl.load(do_row + (k0 + k)[None, :], inside, other=0.0).to(ACC) * bias[None, :], 1)
    w_at = w2 + e.to(tl.int64) * D * F + k[:, None] * F + n[None, :]
    da = tl.zeros([BM, BN], ACC)
    for k0 in range(0, D, BK):
        if EVEN_K:
            rows = tl.load(do_row + (k0 + k)[None, :], used[:, None], other=0.0)
            w = tl.load(w_at, (n < F)[None, :], other=0.0)
        else:
            rows = tl.load(do_row + (k0 + k)[None, :], used[:, None] & (k < D - k0)[None, :], other=0.0)
            w = tl.load(w_at, (k < D - k0)[:, None] & (n < F)[None, :], other=0.0)
        da = dot(rows, w, da)
        w_at += BK * F

    width = 2 * F if GATED else F
    inside = used[:, None] & (n < F)[None, :]
    weight = tl.load(weights + slot.to(tl.int64), used, other=0.0).to(ACC)[:, None]
    z_at = row.to(tl.int64)[:, None] * width + n[None, :]
    up = tl.load(z + z_at + (width - F), inside, other=0.0).to(ACC)
    gate = up
    if GATED:
        gate = tl.load(z + z_at, inside, other=0.0).to(ACC)
    zu = up
    zg = gate
    if ON_INPUT:
        zu = up * weight
        zg = gate * weight
        if HAS_B1:
            b_at = b1 + e.to(tl.int64) * width + n
            zu += tl.load(b_at + (width - F), n < F, other=0.0).to(ACC)[None, :]
            if GATED:
                zg += tl.load(b_at, n < F, other=0.0).to(ACC)[None, :]
    act, dgate, dup = activation_backward_tile(zg, zu, da, KIND, LIMIT, ALPHA)
    if ON_INPUT:
        dweight += tl.sum(dup * up, 1)
        if GATED:
            dweight += tl.sum(dgate * gate, 1)
    else:
        dweight += tl.sum(da * act, 1)
        act *= weight
        dup *= weight
        dgate *= weight
    stored = mine[:, None] & (n < F)[None, :]
    tl.store(dz + z_at + (width - F), rounded(dup, dz.dtype.element_ty), stored)
    if GATED:
        tl.store(dz + z_at, rounded(dgate, dz.dtype.element_ty), stored)
    tl.store(sa + row.to(tl.int64)[:, None] * F + n[None, :], rounded(act, sa.dtype.element_ty), stored)
    tl.store(partials + row.to(tl.int64) * blocks_n + block_n, dweight.to(partials.dtype.element_ty), mine)


def _reference(
    do: Tensor,
    w2: Tensor,
    z: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    weights: Tensor,
    slot_of: Tensor | None,
    offsets: Tensor,
    tiles: Tensor | None,
    slots_per_token: int,
    kind: str,
    limit: float,
    alpha: float,
    on_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    act, R, rows = Activation(kind, limit, alpha), z.shape[0], do
    weights = weights.reshape(-1, 1)
    if slot_of is not None:
        weights = weights.index_select(0, slot_of)
        if slots_per_token:
            rows = do.index_select(0, slot_of.div(slots_per_token, rounding_mode="floor"))
    da = grouped_mm(rows, w2, offsets)
    if on_input:
        bias = None if b1 is None else b1.flatten(1, 2).index_select(0, expert_of_rows(R, offsets))
        a, dz = activation_backward(preactivation(z, weights, bias), da, act)
        dweights = (dz * z).sum(-1, keepdim=True, dtype=weights.dtype)
    else:
        a, dz = activation_backward(z, da, act)
        dweights = da.to(a.dtype).mul_(a).sum(-1, keepdim=True).to(weights.dtype)
        a.mul_(weights)
        dz.mul_(weights)
        if b2 is not None:
            bias = b2.index_select(0, expert_of_rows(R, offsets))
            dweights += (rows * bias).sum(-1, keepdim=True, dtype=dweights.dtype)
    return dz.to(do.dtype), a.to(do.dtype), dweights.masked_fill_(unused_rows(R, offsets), 0)


def _kernels(do, w2, z, b1, b2, weights, slot_of, offsets, tiles, slots_per_token, kind, limit, alpha, on_input):
    R, (_, D, F) = z.shape[0], w2.shape
    tiles = tiles_of(offsets, R) if tiles is None else tiles
    heavy = on_input or kind in ("geglu", "clamped_swiglu")
    b = block("down_dgrad_heavy" if heavy else "down_dgrad", do)
    blocks_n = -(-F // b.n)
    new = do.new_zeros if slot_of is None else do.new_empty
    dz, sa, partials = new(R, z.shape[1]), new(R, F), new(R, blocks_n, dtype=weights.dtype)
    launch(
        _down_dgrad_kernel,
        tiles.shape[1] * blocks_n,
        *(do.contiguous(), w2.contiguous(), z, b1, b2, weights.contiguous(), slot_of, offsets, tiles, dz, sa, partials),
        *(D, F, slots_per_token, tiles.shape[1]),
        KIND=kind,
        LIMIT=limit,
        ALPHA=alpha,
        HAS_B1=b1 is not None,
        HAS_B2=b2 is not None and not on_input,
        ON_INPUT=on_input,
        GATHER=slot_of is not None,
        EVEN_K=D % b.k == 0,
        ACC=tl.float64 if do.dtype == torch.float64 else tl.float32,
        **b.meta,
    )
    return dz, sa, partials


down_dgrad = operator(
    "down_dgrad(Tensor do_, Tensor w2, Tensor z, Tensor? b1, Tensor? b2, Tensor weights, Tensor? slot_of, "
    "Tensor offsets, Tensor? tiles, int slots_per_token, str kind, float limit, float alpha, bool on_input) "
    "-> (Tensor, Tensor, Tensor)",
    _reference,
    _kernels,
)
