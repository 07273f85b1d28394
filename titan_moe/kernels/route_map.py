"""From expert ids per token to rows grouped by expert, and back.

Rows are ordered by expert, then token, then k: a stable sort, no atomics, so the order is the same in every run and
on every device. Minimum traffic 12TK bytes with int32; this version sorts int64 keys (about 40TK).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RouteMap:
    """Where each (token, k) slot sits among the rows.

    There are R = max_rows + 1 rows (0 without tokens), of which the first ``offsets_E[-1]`` are in use. The rest are
    undefined in every buffer, may hold NaN, and are never read; except the last one: whoever sums rows keeps it zero,
    and slots without an expert point at it. So no sum needs a mask, and no shape depends on the data.
    """

    token_of_R: Tensor
    """Int64: token of each row."""
    slot_of_R: Tensor
    """Int64: ``t * K + k`` of each row."""
    row_of_TK: Tensor
    """Int64: row of each slot; R - 1 where the slot has no expert."""
    offsets_E: Tensor
    """Int32: end of each expert's rows; the kind of offsets ``F.grouped_mm`` takes."""


def offsets_of(counts_E: Tensor) -> Tensor:
    """Rows per expert -> int32 end offsets."""
    return counts_E.cumsum(0, dtype=torch.int32)


def route_map(expert_ids_TK: Tensor, counts_E: Tensor, max_rows: int) -> RouteMap:
    """Build the map without a host sync.

    Args:
        expert_ids_TK: int64 in [-1, E); -1 is no expert.
        counts_E: slots per expert.
        max_rows: static bound on ``counts_E.sum()``.
    """
    T, K = expert_ids_TK.shape
    E = counts_E.shape[0]
    device = expert_ids_TK.device
    ids = expert_ids_TK.reshape(-1)
    unused = ids < 0
    order = torch.where(unused, E, ids).sort(stable=True).indices
    R = max_rows + 1 if ids.numel() else 0
    # Slots without an expert sort behind all others, so cutting at max_rows loses none in use.
    slot_of = torch.cat([order[:max_rows], order[:1]])
    row_of = torch.empty_like(order).scatter_(0, order, torch.arange(T * K, device=device))
    return RouteMap(
        token_of_R=slot_of.div(K, rounding_mode="floor"),
        slot_of_R=slot_of,
        row_of_TK=row_of.masked_fill_(unused, R - 1).view(T, K),
        offsets_E=offsets_of(counts_E),
    )
