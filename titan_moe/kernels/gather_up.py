"""First linear of the experts, with the gather of its rows before it and the activation behind it.

    z = x[token_of] W1^T + b1          a = weight * act(z)

x ``[T, D]``, W1 ``[E, n, F, D]``, b1 ``[E, n, F]`` -> z ``[R, nF]``, a ``[R, F]``. The kernel reads x through the route
map, so the gathered rows ``[R, D]`` are never written: it moves TD to RD elements of x (the rest hits the cache), the
weights once per tile of rows, and R(n + 1)F elements out; scale and activation cost no traffic. Saved: x and z.

With the routing weight on the input (Llama 4), z is kept without weight and bias, u = x[token_of] W1^T, since
<dx, x> = <dz, u> then gives the weight's gradient without the rows.
"""

import torch
from torch import Tensor

from titan_moe.kernels.activation import Activation, activation_forward, activation_tile
from titan_moe.kernels.grouped_mm import expert_of_rows, grouped_mm
from titan_moe.kernels.language import dot, rounded, tl, triton
from titan_moe.kernels.launch import block, launch
from titan_moe.kernels.library import operator
from titan_moe.kernels.route_map import tiles_of


@triton.jit
def _gather_up_kernel(
    x,
    w1,
    b1,
    weights,
    slot_of,
    offsets,
    tiles,
    z,
    a,
    D,
    F,
    slots_per_token,
    max_tiles,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    e = tl.load(tiles + tile)
    if e < 0:
        return
    row = tl.load(tiles + max_tiles + tile) + tl.arange(0, BM)
    mine = row < tl.load(offsets + e)
    slot = row
    if GATHER:
        # Rows past the group read some token, unless they have none; what comes of it is not stored.
        slot = tl.load(slot_of + row, mine, other=0)
    used = mine & (slot >= 0)
    token = slot // slots_per_token if GATHER else slot
    n = (tl.program_id(0) % blocks_n) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + token.to(tl.int64)[:, None] * D + k[None, :]
    width = 2 * F if GATED else F
    # Columns past F read those from the start again, so that no load needs a mask.
    w_at = w1 + e.to(tl.int64) * width * D + (n % F)[None, :] * D + k[:, None]
    up = tl.zeros([BM, BN], ACC)
    gate = tl.zeros([BM, BN], ACC)
    for k0 in range(0, D, BK):
        if EVEN_K:
            rows = tl.load(x_at, used[:, None], other=0.0)
            w = tl.load(w_at)
        else:
            rows = tl.load(x_at, used[:, None] & (k < D - k0)[None, :], other=0.0)
            w = tl.load(w_at, (k < D - k0)[:, None], other=0.0)
        if GATED:
            gate = dot(rows, w, gate)
            if EVEN_K:
                w = tl.load(w_at + F * D)
            else:
                w = tl.load(w_at + F * D, (k < D - k0)[:, None], other=0.0)
        up = dot(rows, w, up)
        x_at += BK
        w_at += BK

    inside = mine[:, None] & (n < F)[None, :]
    weight = tl.load(weights + slot.to(tl.int64), used, other=0.0).to(ACC)[:, None]
    z_at = z + row.to(tl.int64)[:, None] * width + n[None, :]
    b_at = b1 + e.to(tl.int64) * width + n if HAS_BIAS else n
    if ON_INPUT:
        tl.store(z_at + (width - F), rounded(up, z.dtype.element_ty), inside)
        if GATED:
            tl.store(z_at, rounded(gate, z.dtype.element_ty), inside)
        up *= weight
        gate *= weight
    if HAS_BIAS:
        up += tl.load(b_at + (width - F), n < F, other=0.0).to(ACC)[None, :]
        if GATED:
            gate += tl.load(b_at, n < F, other=0.0).to(ACC)[None, :]
    if not ON_INPUT:
        tl.store(z_at + (width - F), rounded(up, z.dtype.element_ty), inside)
        if GATED:
            tl.store(z_at, rounded(gate, z.dtype.element_ty), inside)
    act = activation_tile(gate, up, KIND, LIMIT, ALPHA)
    if not ON_INPUT:
        act *= weight
    tl.store(a + row.to(tl.int64)[:, None] * F + n[None, :], rounded(act, a.dtype.element_ty), inside)


def _reference(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    weights: Tensor,
    slot_of: Tensor | None,
    offsets: Tensor,
    tiles: Tensor | None,
    slots_per_token: int,
    kind: str,
    limit: float,
    alpha: float,
    on_input: bool,
) -> tuple[Tensor, Tensor]:
    act = Activation(kind, limit, alpha)
    rows, weights = x.contiguous(), weights.reshape(-1, 1)
    if slot_of is not None:
        token_of = slot_of if slots_per_token == 1 else slot_of.div(slots_per_token, rounding_mode="floor")
        rows, weights = x.index_select(0, token_of), weights.index_select(0, slot_of)
    z = grouped_mm(rows, w1.flatten(1, 2).transpose(1, 2), offsets)
    bias = None if b1 is None else b1.flatten(1, 2).index_select(0, expert_of_rows(rows.shape[0], offsets))
    if on_input:
        return z, activation_forward(preactivation(z, weights, bias), act).to(x.dtype)
    if bias is not None:
        z += bias
    return z, activation_forward(z, act).mul_(weights).to(x.dtype)


def preactivation(u: Tensor, weights_R1: Tensor, bias_R: Tensor | None) -> Tensor:
    """z from the product without weight and bias, where the weight is on the input; in at least fp32."""
    z = u * weights_R1
    return z if bias_R is None else z.add_(bias_R)


def _kernels(x, w1, b1, weights, slot_of, offsets, tiles, slots_per_token, kind, limit, alpha, on_input):
    D, (_, n, F) = x.shape[1], w1.shape[:3]
    R = x.shape[0] if slot_of is None else slot_of.shape[0]
    tiles = tiles_of(offsets, R) if tiles is None else tiles
    z, a = x.new_empty(R, n * F), x.new_empty(R, F)
    b = block("gather_up", x)
    x, w1, weights = x.contiguous(), w1.contiguous(), weights.contiguous()
    launch(
        _gather_up_kernel,
        tiles.shape[1] * -(-F // b.n),
        *(x, w1, b1, weights, slot_of, offsets, tiles, z, a, D, F, slots_per_token, tiles.shape[1]),
        KIND=kind,
        LIMIT=limit,
        ALPHA=alpha,
        HAS_BIAS=b1 is not None,
        ON_INPUT=on_input,
        GATHER=slot_of is not None,
        EVEN_K=D % b.k == 0,
        ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
        **b.meta,
    )
    return z, a


gather_up = operator(
    "gather_up(Tensor x, Tensor w1, Tensor? b1, Tensor weights, Tensor? slot_of, Tensor offsets, Tensor? tiles, "
    "int slots_per_token, str kind, float limit, float alpha, bool on_input) -> (Tensor, Tensor)",
    _reference,
    _kernels,
)
