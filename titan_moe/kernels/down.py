"""Second linear of the experts: y = a W2^T + w b2, with ``a`` weighted already.

a ``[R, F]``, W2 ``[E, D, F]``, b2 ``[E, D]`` -> y ``[R, D]``. Reads RF and writes RD elements, besides W2 once per tile
of rows; saves nothing: ``a`` is recomputed from z. With the routing weight on the input, b2 is added as it is.
"""

from torch import Tensor

from titan_moe.kernels.grouped_mm import expert_of_rows, grouped_mm, unused_rows
from titan_moe.kernels.library import operator
from titan_moe.kernels.rows_gemm import rows_gemm


def _reference(
    a: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    weights: Tensor,
    slot_of: Tensor | None,
    offsets: Tensor,
    tiles: Tensor | None,
    weigh_bias: bool,
) -> Tensor:
    y = grouped_mm(a, w2.transpose(1, 2), offsets)
    if b2 is not None:
        bias = b2.index_select(0, expert_of_rows(a.shape[0], offsets))
        if weigh_bias:
            weights = weights.reshape(-1, 1)
            bias = bias * (weights if slot_of is None else weights.index_select(0, slot_of))
        y += bias
    if slot_of is None:
        return y.masked_fill_(unused_rows(a.shape[0], offsets), 0)
    y[-1:].zero_()
    return y


def _kernels(a, w2, b2, weights, slot_of, offsets, tiles, weigh_bias):
    return rows_gemm(a, w2.transpose(1, 2), b2, weights, slot_of, offsets, tiles, weigh_bias=weigh_bias)


down = operator(
    "down(Tensor a, Tensor w2, Tensor? b2, Tensor weights, Tensor? slot_of, Tensor offsets, Tensor? tiles, "
    "bool weigh_bias) -> Tensor",
    _reference,
    _kernels,
)
