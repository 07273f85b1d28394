"""From expert ids per token to rows grouped by expert, and back.

Rows are ordered by expert, then token, then k: a stable sort, no atomics, so the order is the same in every run and
on every device. Ids ``[T, K]`` -> slots ``[R]``, rows ``[T, K]``, offsets ``[E]`` and, for the kernels, the list of
tiles. Minimum traffic 12TK bytes with int32, which the kernel moves, plus one count per block and expert; the torch
version sorts int64 keys (about 40TK).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_moe.kernels.language import tl, triton
from titan_moe.kernels.launch import launch, tile_rows
from titan_moe.kernels.library import operator

BLOCK_TOKENS = 64
_SLOTS = 32
_MOST_BLOCKS = 256


@dataclass(frozen=True)
class RouteMap:
    """Where each (token, k) slot sits among the rows.

    There are R = max_rows + 1 rows (0 without tokens), of which the first ``offsets_E[-1]`` are in use. The rest are
    undefined in every buffer, may hold NaN, and are never read; except the last one: in torch, whoever sums rows
    keeps it zero, and slots without an expert point at it. So no sum needs a mask, and no shape depends on the data.

    Index tensors are int64 from the torch version and int32 from the kernel.
    """

    slot_of_R: Tensor
    """``t * K + k`` of each row; some slot where unused; -1 where a row only aligns its group."""
    row_of_TK: Tensor
    """Row of each slot; R - 1 where the slot has no expert."""
    offsets_E: Tensor
    """Int32: end of each expert's rows; the kind of offsets ``F.grouped_mm`` takes."""
    slots_per_token: int
    """K: the token of a row is its slot over this."""
    tiles: Tensor | None = None
    """Int32 ``[2, ceil(max_rows / m) + E]``, expert (-1: none) and first row of each tile of m rows; or not known."""

    @property
    def token_of_R(self) -> Tensor:
        """Token of each row."""
        if self.slots_per_token == 1:
            return self.slot_of_R
        return self.slot_of_R.div(self.slots_per_token, rounding_mode="floor")


def offsets_of(counts_E: Tensor) -> Tensor:
    """Rows per expert -> int32 end offsets."""
    return counts_E.cumsum(0, dtype=torch.int32)


def max_tiles(rows: int, num_experts: int, m: int) -> int:
    """Most tiles of m rows that groups of ``rows`` rows in all can make."""
    return -(-rows // m) + num_experts


@triton.jit
def _count_kernel(
    ids, partials, T, S, K, E, blocks_per_sequence, BLOCK: tl.constexpr, SLOTS: tl.constexpr, E2: tl.constexpr
):
    b = tl.program_id(0)
    first = (b // blocks_per_sequence) * S + (b % blocks_per_sequence) * BLOCK
    last = tl.minimum(first + BLOCK, (b // blocks_per_sequence + 1) * S)
    experts = tl.arange(0, E2)
    counts = tl.zeros([E2], tl.int32)
    for s in range(0, (last - first) * K, SLOTS):
        slot = s + tl.arange(0, SLOTS)
        e = tl.load(ids + first * K + slot, slot < (last - first) * K, other=-1).to(tl.int32)
        counts += tl.sum((e[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(partials + b * E + experts, counts, experts < E)


@triton.jit
def _route_map_kernel(
    ids,
    partials,
    slot_of,
    row_of,
    offsets,
    tiles,
    S,
    K,
    E,
    R,
    blocks_per_sequence,
    blocks,
    max_tiles,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    E2: tl.constexpr,
):
    b = tl.program_id(0)
    first = (b // blocks_per_sequence) * S + (b % blocks_per_sequence) * BLOCK
    last = tl.minimum(first + BLOCK, (b // blocks_per_sequence + 1) * S)
    experts = tl.arange(0, E2)
    total = tl.zeros([E2], tl.int32)
    ahead = tl.zeros([E2], tl.int32)
    for i in range(blocks):
        counts = tl.load(partials + i * E + experts, experts < E, other=0)
        total += counts
        ahead += tl.where(i < b, counts, 0)
    padded = (total + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(padded, 0)
    start = end - padded
    used = tl.sum(padded, 0)
    if b == 0:
        tl.store(offsets + experts, end, experts < E)

    following = start + ahead
    for s in range(0, (last - first) * K, SLOTS):
        index = s + tl.arange(0, SLOTS)
        inside = index < (last - first) * K
        slot = first * K + index
        e = tl.load(ids + slot, inside, other=-1).to(tl.int32)
        mine = e[:, None] == experts[None, :]
        rank = tl.cumsum(mine.to(tl.int32), 0)
        row = tl.sum(tl.where(mine, following[None, :] + rank - 1, 0), 1)
        tl.store(row_of + slot, tl.where(e >= 0, row, R - 1), inside)
        tl.store(slot_of + row, slot, inside & (e >= 0))
        following += tl.sum(mine.to(tl.int32), 0)

    # What follows is shared out: each program takes every blocks-th part.
    for r in range(b * SLOTS, R - used, blocks * SLOTS):
        tail = r + tl.arange(0, SLOTS)
        tl.store(slot_of + used + tail, tl.zeros([SLOTS], tl.int32), tail < R - used)
    if ALIGN > 1:
        for e in range(b, E, blocks):
            at = experts == e
            row = tl.sum(tl.where(at, start + total, 0), 0)
            n = tl.sum(tl.where(at, padded - total, 0), 0)
            for i in range(0, n, SLOTS):
                fill = i + tl.arange(0, SLOTS)
                tl.store(slot_of + row + fill, tl.full([SLOTS], -1, tl.int32), fill < n)
    tiles_of = (padded + TILE - 1) // TILE
    last_tile = tl.cumsum(tiles_of, 0)
    for t in range(b * SLOTS, max_tiles, blocks * SLOTS):
        tile = t + tl.arange(0, SLOTS)
        e = tl.sum(((last_tile[None, :] <= tile[:, None]) & (experts < E)[None, :]).to(tl.int32), 1)
        mine = e[:, None] == experts[None, :]
        row = tl.sum(tl.where(mine, (start - (last_tile - tiles_of) * TILE)[None, :], 0), 1) + tile * TILE
        tl.store(tiles + tile, tl.where(e < E, e, -1), tile < max_tiles)
        tl.store(tiles + max_tiles + tile, row, tile < max_tiles)


@triton.jit
def _tiles_kernel(offsets, tiles, E, max_tiles, TILE: tl.constexpr, SLOTS: tl.constexpr, E2: tl.constexpr):
    experts = tl.arange(0, E2)
    end = tl.load(offsets + experts, experts < E, other=0)
    start = tl.load(offsets + experts - 1, (experts > 0) & (experts < E), other=0)
    tiles_of = (end - start + TILE - 1) // TILE
    last_tile = tl.cumsum(tiles_of, 0)
    tile = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    e = tl.sum(((last_tile[None, :] <= tile[:, None]) & (experts < E)[None, :]).to(tl.int32), 1)
    mine = e[:, None] == experts[None, :]
    row = tl.sum(tl.where(mine, (start - (last_tile - tiles_of) * TILE)[None, :], 0), 1) + tile * TILE
    tl.store(tiles + tile, tl.where(e < E, e, -1), tile < max_tiles)
    tl.store(tiles + max_tiles + tile, row, tile < max_tiles)


def block_tokens(sequence: int, num_sequences: int) -> int:
    """Tokens of a block: every program reads the counts of all blocks, so their number is bounded."""
    block = BLOCK_TOKENS
    while num_sequences * -(-sequence // block) > max(_MOST_BLOCKS, num_sequences):
        block *= 2
    return block


def _reference(ids: Tensor, counts: Tensor, max_rows: int, sequences: int, alignment: int):
    T, K = ids.shape
    counts = counts if counts.dim() == 1 else counts.sum(0)
    E = counts.shape[0]
    flat = ids.reshape(-1)
    unused = flat < 0
    order = torch.where(unused, E, flat).sort(stable=True).indices
    R = max_rows + 1 if flat.numel() else 0
    offsets = offsets_of(counts)
    if alignment == 1:
        # Slots without an expert sort behind all others, so cutting at max_rows loses none in use.
        slot_of = torch.cat([order[:max_rows], order[:1]])
        row_of = torch.empty_like(order).scatter_(0, order, torch.arange(T * K, device=ids.device))
    else:
        padded = (counts + alignment - 1) // alignment * alignment
        shift = offsets_of(padded) - padded - (offsets - counts)
        offsets = offsets_of(padded)
        row = torch.arange(T * K, device=ids.device) + torch.nn.functional.pad(shift, (0, 1))[flat[order]]
        row_of = torch.empty_like(order).scatter_(0, order, torch.where(unused[order], R - 1, row))
        # The spare row takes whatever comes; all that comes is a slot.
        slot_of = torch.where(torch.arange(R, device=ids.device) < offsets[-1], -1, 0).to(order.dtype)
        slot_of = slot_of.scatter_(0, row_of, torch.arange(T * K, device=ids.device)) if R else slot_of
    return slot_of, row_of.masked_fill_(unused, R - 1).view(T, K), offsets, offsets.new_empty(2, 0)


def _kernels(ids: Tensor, counts: Tensor, max_rows: int, sequences: int, alignment: int):
    T, K = ids.shape
    E, R, S = counts.shape[-1], max_rows + 1, T // sequences
    assert T * K < 2**31 and R < 2**31, (T, K, R)
    m = tile_rows(ids.device)
    ids = ids.contiguous()
    block = block_tokens(S, sequences)
    per_sequence = -(-S // block)
    blocks, E2 = sequences * per_sequence, triton.next_power_of_2(E)
    # One-hot matrices of slots by experts live in registers.
    shape = {"BLOCK": block, "SLOTS": max(min(_SLOTS, 2048 // E2), 1), "E2": E2, "num_warps": 4}
    partials = counts
    if counts.dim() == 1:
        partials = counts.new_empty(blocks, E, dtype=torch.int32)
        launch(_count_kernel, blocks, ids, partials, T, S, K, E, per_sequence, **shape)
    tiles = counts.new_empty(2, max_tiles(max_rows, E, m), dtype=torch.int32)
    slot_of = counts.new_empty(R, dtype=torch.int32)
    row_of = counts.new_empty(T, K, dtype=torch.int32)
    offsets = counts.new_empty(E, dtype=torch.int32)
    sizes = S, K, E, R, per_sequence, blocks, tiles.shape[1]
    launch(
        _route_map_kernel,
        blocks,
        *(ids, partials, slot_of, row_of, offsets, tiles, *sizes),
        **{"ALIGN": alignment, "TILE": m, **shape},
    )
    return slot_of, row_of, offsets, tiles


_route_map = operator(
    "route_map(Tensor ids, Tensor counts, SymInt max_rows, SymInt sequences, SymInt alignment)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _reference,
    _kernels,
)


def route_map(
    expert_ids_TK: Tensor,
    counts: Tensor,
    max_rows: int,
    *,
    num_sequences: int = 1,
    alignment: int = 1,
) -> RouteMap:
    """Build the map without a host sync.

    Args:
        expert_ids_TK: integers in [-1, E); -1 is no expert. An id may come twice in a row.
        counts: slots per expert ``[E]``; or int32 of each block of tokens ``[N, E]``, as ``router_topk`` makes them,
            which saves the kernels a pass over the ids.
        max_rows: static bound on the rows in use, the sum of ``counts`` when not aligned.
        num_sequences: B, dividing T, of which no block holds two.
        alignment: each group starts at a multiple of this; the rows between have slot -1. ``offsets_E`` then ends
            each group at the next one's start, and ``max_rows`` must bound that.
    """
    assert alignment > 0
    slot_of, row_of, offsets, tiles = _route_map(expert_ids_TK, counts, max_rows, max(num_sequences, 1), alignment)
    return RouteMap(slot_of, row_of, offsets, expert_ids_TK.shape[1], tiles if tiles.shape[1] else None)


def _tiles_reference(offsets: Tensor, rows: int) -> Tensor:
    return offsets.new_empty(2, 0)


def _tiles_kernels(offsets: Tensor, rows: int) -> Tensor:
    E, m = offsets.shape[0], tile_rows(offsets.device)
    tiles = offsets.new_empty(2, max_tiles(rows, E, m))
    programs = -(-tiles.shape[1] // _SLOTS)
    E2 = triton.next_power_of_2(E)
    launch(_tiles_kernel, programs, offsets, tiles, E, tiles.shape[1], TILE=m, SLOTS=_SLOTS, E2=E2)
    return tiles


_tiles = operator("tiles(Tensor offsets, SymInt rows) -> Tensor", _tiles_reference, _tiles_kernels)


def tiles_of(offsets_E: Tensor, rows: int) -> Tensor:
    """The list of tiles of a map that was made elsewhere, as ``RouteMap.tiles``; empty where kernels do not run."""
    return _tiles(offsets_E, rows)
