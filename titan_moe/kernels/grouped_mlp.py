"""The experts of one layer as one operator: gather, first linear, activation x routing weight, second linear, sum.

    z = x[token_of] W1^T + b1     y = (w act(z)) W2^T + w b2     out[t] = sum over the rows r of t: y[r]

The routing weight multiplies the activation, before the second linear (memory-efficient permutation, report section
4.1.2), so that the output of the second linear need not be kept for the weight's gradient:
with da = dy W2, dw = <da, act(z)> + <dy, b2>, where act(z) is recomputed from z.

This is the one place where the parts are put together, for both backends: each part is an operator with a torch and a
Triton implementation. Saved for backward: the layer's own input x, the weights and indices, and by ``save``

- ``preact``: z, so that D + K(nF + 1) elements per token are kept;
- ``input``: nothing more, D + K; the first linear runs again;
- ``preact_fp8``: z in FP8, K nF (1 + 1/32) bytes in its place, within the error bound of ``quant_rows``. The output is
  that of the others; gradients are those of the z that comes back.

Launches on Triton: 3 forward, 5 backward, and one more each way for FP8 and backward for ``input``; no host sync
(float64 in torch excepted, see ``grouped_mm``).
"""

from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.activation import Activation
from titan_moe.kernels.backend import use_triton
from titan_moe.kernels.combine import sum_rows, sum_rows_and_weights, sum_weights
from titan_moe.kernels.down import down
from titan_moe.kernels.down_dgrad import down_dgrad
from titan_moe.kernels.gather_up import gather_up
from titan_moe.kernels.grouped_mm import unused_rows
from titan_moe.kernels.mlp_cpu import in_pieces, mlp_cpu, mlp_cpu_backward
from titan_moe.kernels.quant_rows import dequant_rows, quant_rows
from titan_moe.kernels.route_map import RouteMap
from titan_moe.kernels.up_dgrad import up_dgrad
from titan_moe.kernels.wgrad import wgrad

Save = Literal["preact", "input", "preact_fp8"]


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2, b1, b2, weights, offsets, row_of, slot_of, tiles, slots_per_token, act, on_input, save):
        kind = act.kind, act.limit, act.alpha, on_input
        maps = weights, offsets, row_of, slot_of, tiles
        ctx.kind, ctx.slots_per_token, ctx.save = kind, slots_per_token, save
        if in_pieces(x):
            y, kept = mlp_cpu(x, w1, b1, w2, b2, weights, slot_of, offsets, slots_per_token, *kind, save)
            ctx.save_for_backward(x, w1, w2, b1, b2, *maps, *kept)
            return y
        z, a = gather_up(x, w1, b1, weights, slot_of, offsets, tiles, slots_per_token, *kind)
        y = down(a, w2, b2, weights, slot_of, offsets, tiles, not on_input)
        if row_of is not None:
            y = sum_rows(y, row_of)
        kept = ()
        if save == "preact":
            kept = (z,)
        elif save == "preact_fp8":
            kept = quant_rows(z)
        ctx.save_for_backward(x, w1, w2, b1, b2, *maps, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        x, w1, w2, b1, b2, weights, offsets, row_of, slot_of, tiles, *kept = ctx.saved_tensors
        on_input, K = ctx.kind[-1], ctx.slots_per_token
        if in_pieces(x):
            operands = w1, b1, w2, b2, weights, slot_of, offsets, K, *ctx.kind, ctx.save
            dx, dw1, dw2, db1, db2, dweights = mlp_cpu_backward(do, x, kept, *operands, ctx.needs_input_grad[0])
            dx = dx if ctx.needs_input_grad[0] else None
            db1 = None if b1 is None else db1.view_as(b1)
            return dx, dw1, dw2, db1, None if b2 is None else db2, dweights, *(None,) * 8
        if ctx.save == "input":
            z, _ = gather_up(x, w1, b1, weights, slot_of, offsets, tiles, K, *ctx.kind)
        else:
            z = kept[0] if ctx.save == "preact" else dequant_rows(*kept, x.dtype)
        gather = slot_of is not None
        dy, K_dy = do.contiguous(), K
        if gather and not use_triton(dy):
            # Two products read these rows; only kernels can gather them on the way.
            dy, K_dy = dy.index_select(0, slot_of.div(K, rounding_mode="floor")), 0
        dz, sa, dweights = down_dgrad(
            dy, w2, z, b1 if on_input else None, b2, weights, slot_of, offsets, tiles, K_dy, *ctx.kind
        )
        bias = b2 is not None, not on_input
        dw2, db2 = wgrad(dy, sa, weights, slot_of, offsets, K, gather and K_dy > 0, False, False, *bias, None)
        del dy, sa
        dw1, db1 = wgrad(dz, x, weights, slot_of, offsets, K, False, gather, on_input, b1 is not None, False, None)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = up_dgrad(dz, w1, weights, slot_of, offsets, tiles, on_input)
        if row_of is None:
            dweights = dweights.sum(1).masked_fill_(unused_rows(dweights.shape[0], offsets)[:, 0], 0)
        elif dx is None:
            dweights = sum_weights(dweights, row_of)
        else:
            dx, dweights = sum_rows_and_weights(dx, row_of, dweights)
        db1 = None if b1 is None else db1.view_as(b1)
        db2 = None if b2 is None else db2
        return dx, dw1.view_as(w1), dw2, db1, db2, dweights.view_as(weights), *(None,) * 8


def grouped_mlp(
    x: Tensor,
    w1_EnFD: Tensor,
    w2_EDF: Tensor,
    b1_EnF: Tensor | None,
    b2_ED: Tensor | None,
    weights: Tensor,
    offsets_E: Tensor,
    act: Activation,
    weight_on: str = "activation",
    route_map: RouteMap | None = None,
    save: Save = "preact",
) -> Tensor:
    """Apply each expert to its rows; differentiable once.

    Args:
        x: with ``route_map``, tokens ``[T, D]``; else rows ``[R, D]`` sorted by expert.
        weights: routing weight of each slot ``[T, K]``, or of each row ``[R]``; fp32 or wider.
        offsets_E: int32, end row of each expert.
        weight_on: "activation", or "input" (Llama 4: the weight multiplies the expert's input; b2 is not weighted).
        save: what is kept of the pre-activation.

    Returns:
        Of the shape of ``x``: the sum over each token's rows; without a map the rows, zero and without gradient past
        the last offset.
    """
    maps = None, None, None, 1
    if route_map is not None:
        maps = route_map.row_of_TK, route_map.slot_of_R, route_map.tiles, route_map.slots_per_token
    kind = act, weight_on == "input", save
    return _GroupedMLP.apply(x, w1_EnFD, w2_EDF, b1_EnF, b2_ED, weights, offsets_E, *maps, *kind)
