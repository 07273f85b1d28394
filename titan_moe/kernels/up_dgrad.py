"""Gradient of the first linear's input, per row: dx = dz W1, times the routing weight where it is on the input.

dz ``[R, nF]``, W1 ``[E, n, F, D]`` -> ``[R, D]``. Reads RnF and writes RD elements, besides W1 once per tile of rows;
saves nothing. ``combine`` sums the rows of each token.
"""

from torch import Tensor

from titan_moe.kernels.grouped_mm import grouped_mm, unused_rows
from titan_moe.kernels.library import operator
from titan_moe.kernels.rows_gemm import rows_gemm


def _reference(
    dz: Tensor,
    w1: Tensor,
    weights: Tensor,
    slot_of: Tensor | None,
    offsets: Tensor,
    tiles: Tensor | None,
    on_input: bool,
) -> Tensor:
    dx = grouped_mm(dz, w1.flatten(1, 2), offsets)
    if on_input:
        weights = weights.reshape(-1, 1)
        dx = (dx * (weights if slot_of is None else weights.index_select(0, slot_of))).to(dz.dtype)
    if slot_of is None:
        return dx.masked_fill_(unused_rows(dz.shape[0], offsets), 0)
    dx[-1:].zero_()
    return dx


def _kernels(dz, w1, weights, slot_of, offsets, tiles, on_input):
    return rows_gemm(dz, w1.flatten(1, 2), None, weights, slot_of, offsets, tiles, scale=on_input)


up_dgrad = operator(
    "up_dgrad(Tensor dz, Tensor w1, Tensor weights, Tensor? slot_of, Tensor offsets, Tensor? tiles, bool on_input) "
    "-> Tensor",
    _reference,
    _kernels,
)
