"""The experts of one layer as one operator: gather, first linear, activation x routing weight, second linear.

    z = x[token_of] W1^T + b1          y = (w act(z)) W2^T + w b2

The routing weight multiplies the activation, before the second linear (memory-efficient permutation, report section
4.1.2), so that the output of the second linear need not be kept for the weight's gradient:
with da' = dy W2, dw = <da', act(z)> + <dy, b2>, where act(z) is recomputed from z.

Saved for backward: x, z, the weights and indices, that is D + K(nF + 1) elements per token with x the layer's own
input. Products: 2 forward, 4 backward, all over groups of rows; no host sync (float64 excepted, see ``grouped_mm``).
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.kernels.activation import Activation, activation_backward, activation_forward
from titan_moe.kernels.combine import sum_rows
from titan_moe.kernels.grouped_mm import grouped_mm
from titan_moe.kernels.route_map import RouteMap


def _unused_rows(R: int, offsets_E: Tensor) -> Tensor:
    return torch.arange(R, device=offsets_E.device) >= offsets_E[-1]


def _expert_of_rows(R: int, offsets_E: Tensor) -> Tensor:
    rows = torch.arange(R, device=offsets_E.device, dtype=torch.int32)
    return torch.searchsorted(offsets_E, rows, right=True).clamp_(max=offsets_E.shape[0] - 1)


def _column_sums(x_RN: Tensor, weights_R: Tensor | None, offsets_E: Tensor) -> Tensor:
    """Sum over each group's rows, weighted: ``[R, N] -> [E, N]``."""
    # Eight equal columns keep the product's strides a multiple of 16 bytes in every dtype.
    w = x_RN.new_ones(x_RN.shape[0]) if weights_R is None else weights_R.to(x_RN.dtype)
    return grouped_mm(w.unsqueeze(1).expand(-1, 8).contiguous().t(), x_RN, offsets_E)[:, 0]


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2, b1, b2, weights, offsets, row_of, token_of, act, weight_on_input):
        rows = x.contiguous() if token_of is None else x.index_select(0, token_of)
        if weight_on_input:
            rows = (rows * weights.unsqueeze(1)).to(x.dtype)
        R = rows.shape[0]
        z = grouped_mm(rows, w1.flatten(1, 2).transpose(1, 2), offsets)
        if b1 is not None:
            z += b1.flatten(1, 2).index_select(0, _expert_of_rows(R, offsets))
        a = activation_forward(z, act)
        if not weight_on_input:
            a.mul_(weights.unsqueeze(1))
        y = grouped_mm(a.to(x.dtype), w2.transpose(1, 2), offsets)
        if b2 is not None:
            bias = b2.index_select(0, _expert_of_rows(R, offsets))
            y += bias if weight_on_input else bias * weights.unsqueeze(1)
        if token_of is None:
            y.masked_fill_(_unused_rows(R, offsets).unsqueeze(1), 0)
        else:
            y[-1:].zero_()
        ctx.save_for_backward(x, w1, w2, b2, weights, offsets, row_of, token_of, z)
        ctx.act, ctx.weight_on_input, ctx.has_b1 = act, weight_on_input, b1 is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w1, w2, b2, weights, offsets, row_of, token_of, z = ctx.saved_tensors
        on_input = ctx.weight_on_input
        dy = dy.contiguous()
        unused = _unused_rows(dy.shape[0], offsets)
        db1 = db2 = dweights = None

        da = grouped_mm(dy, w2, offsets)
        a, dz = activation_backward(z, da, ctx.act)
        if not on_input:
            dweights = da.to(a.dtype).mul_(a).sum(-1)
            a.mul_(weights.unsqueeze(1))
            dz.mul_(weights.unsqueeze(1))
        del da
        dw2 = grouped_mm(dy.t(), a.to(dy.dtype), offsets)
        if b2 is not None:
            db2 = _column_sums(dy, None if on_input else weights, offsets)
            if not on_input:
                bias = b2.index_select(0, _expert_of_rows(dy.shape[0], offsets))
                dweights += (dy * bias).sum(-1, dtype=dweights.dtype)
        del a, dy

        rows = x.contiguous() if token_of is None else x.index_select(0, token_of)
        dz = dz.to(x.dtype)
        weighted = (rows * weights.unsqueeze(1)).to(x.dtype) if on_input else rows
        dw1 = grouped_mm(dz.t(), weighted, offsets).view_as(w1)
        if ctx.has_b1:
            db1 = _column_sums(dz, None, offsets).view(w1.shape[:3])
        drows = None
        if on_input or ctx.needs_input_grad[0]:
            drows = grouped_mm(dz, w1.flatten(1, 2), offsets)
        if on_input:
            dweights = (drows.to(weights.dtype) * rows).sum(-1)
            drows = (drows * weights.unsqueeze(1)).to(x.dtype)
        if not ctx.needs_input_grad[0]:
            dx = None
        elif token_of is None:
            dx = drows.masked_fill_(unused.unsqueeze(1), 0)
        else:
            drows[-1:].zero_()
            dx = sum_rows(drows, row_of)
        dweights = dweights.masked_fill_(unused, 0).to(weights.dtype)
        return dx, dw1, dw2, db1, db2, dweights, None, None, None, None, None


def grouped_mlp(
    x: Tensor,
    w1_EnFD: Tensor,
    w2_EDF: Tensor,
    b1_EnF: Tensor | None,
    b2_ED: Tensor | None,
    weights_R: Tensor,
    offsets_E: Tensor,
    act: Activation,
    weight_on: str = "activation",
    route_map: RouteMap | None = None,
) -> Tensor:
    """Apply each expert to its rows; differentiable once.

    Args:
        x: rows ``[R, D]`` sorted by expert; or, with ``route_map``, tokens ``[T, D]`` to gather them from.
        weights_R: routing weight of each row, fp32 or wider.
        offsets_E: int32, end row of each expert.
        weight_on: "activation", or "input" (Llama 4: the weight multiplies the expert's input; b2 is not weighted).

    Returns:
        ``[R, D]``. Rows past the last offset are zero and get no gradient; with ``route_map`` they are undefined
        except for the last, as ``RouteMap`` says.
    """
    row_of, token_of = (None, None) if route_map is None else (route_map.row_of_TK, route_map.token_of_R)
    return _GroupedMLP.apply(
        x, w1_EnFD, w2_EDF, b1_EnF, b2_ED, weights_R, offsets_E, row_of, token_of, act, weight_on == "input"
    )
