"""Route map and combine in Triton's interpreter, against counting and summing by hand."""

import pytest
import torch
from interpreter import backend, by_triton, within_one_rounding

from titan_moe.kernels.combine import combine, sum_rows, sum_rows_and_weights
from titan_moe.kernels.launch import tile_rows
from titan_moe.kernels.route_map import RouteMap, route_map, tiles_of

CPU = torch.device("cpu")


def random_ids(T, K, E, empty=0.0, seed=0, dtype=torch.int64):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(E, (T, K), generator=g) if K > E else torch.rand(T, E, generator=g).topk(K).indices
    return torch.where(torch.rand(T, K, generator=g) < empty, -1, ids).to(dtype)


def make(ids, E, **options):
    counts = torch.bincount(ids[ids >= 0].long(), minlength=E)
    max_rows = options.pop("max_rows", ids.numel())
    m = route_map(ids, options.pop("partials", counts), max_rows, **options)
    return counts, (m.slot_of_R, m.row_of_TK, m.offsets_E, m.tiles)


def check_map(ids, E, counts, slot_of, row_of, offsets, tiles, max_rows):
    """Against a stable sort in Python."""
    slots = sorted((e, s) for s, e in enumerate(ids.flatten().tolist()) if e >= 0)
    used, R = len(slots), max_rows + 1
    assert slot_of.shape == (R,) and slot_of[:used].tolist() == [s for _, s in slots]
    assert ((slot_of >= 0) & (slot_of < ids.numel())).all()
    rows = {s: r for r, (_, s) in enumerate(slots)}
    assert row_of.flatten().tolist() == [rows.get(s, R - 1) for s in range(ids.numel())]
    assert offsets.tolist() == counts.cumsum(0).tolist()
    check_tiles(tiles, counts.tolist(), [0, *offsets.tolist()[:-1]])


def check_tiles(tiles, sizes, starts):
    m = tile_rows(CPU)
    expected = [(e, start + i) for e, (n, start) in enumerate(zip(sizes, starts, strict=True)) for i in range(0, n, m)]
    assert tiles.T[: len(expected)].tolist() == [list(pair) for pair in expected]
    assert (tiles[0, len(expected) :] == -1).all()


@pytest.mark.parametrize("E, K", [(1, 1), (1, 22), (7, 2), (8, 6), (60, 6), (64, 8), (128, 2), (160, 6)])
def test_route_map_is_a_stable_sort(E, K):
    ids = random_ids(37, K, E, empty=0.2, seed=E)
    counts, result = by_triton(make, ids, E)
    check_map(ids, E, counts, *result, max_rows=37 * K)


@pytest.mark.slow
@pytest.mark.parametrize("E", [1, 7, 8, 60, 64, 128, 160, 256, 384, 512])
@pytest.mark.parametrize("K", [1, 2, 6, 8, 22])
def test_route_map_is_a_stable_sort_for_all_sizes(E, K):
    ids = random_ids(67, K, E, seed=E + K)
    with backend("triton"):
        counts, result = make(ids, E)
    check_map(ids, E, counts, *result, max_rows=67 * K)
    assert sorted(result[1].flatten().tolist()) == list(range(67 * K))


@pytest.mark.parametrize("max_rows", [90, 45])
def test_route_map_with_fewer_rows_than_slots(max_rows):
    ids = random_ids(30, 3, 5, empty=0.5, dtype=torch.int32)
    assert (ids >= 0).sum() <= 45
    counts, result = by_triton(make, ids, 5, max_rows=max_rows)
    check_map(ids, 5, counts, *result, max_rows=max_rows)


@pytest.mark.parametrize("sequences", [1, 3])
def test_route_map_takes_counts_of_blocks_of_sequences(sequences):
    """Sequences longer than a block, of a length that is no multiple of it."""
    T, K, E, S = 3 * 70, 2, 5, 3 * 70 // sequences
    ids = random_ids(T, K, E, empty=0.1)
    blocks = [part for row in ids.view(sequences, S, K) for part in row.split(64)]
    partials = torch.stack([torch.bincount(b[b >= 0], minlength=E) for b in blocks]).int()
    counts, result = by_triton(make, ids, E, partials=partials, num_sequences=sequences)
    check_map(ids, E, counts, *result, max_rows=T * K)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("alignment", [16, 32, 128])
def test_fault_34_44_0_7_padded_to_the_alignment_and_back_is_the_identity(name, alignment):
    order = torch.randperm(51, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0] * 44 + [2] * 7)[order].view(-1, 1)
    padded = [-(-n // alignment) * alignment for n in (44, 0, 7)]
    with backend(name):
        _, (slot_of, row_of, offsets, tiles) = make(ids, 3, max_rows=sum(padded) + 5, alignment=alignment)
    assert offsets.tolist() == [padded[0], padded[0], sum(padded)]
    assert (row_of % alignment == (row_of - torch.tensor([0, 0, padded[0]])[ids]) % alignment).all()
    assert torch.equal(slot_of[row_of.flatten().long()].long(), torch.arange(51))
    assert (slot_of[: sum(padded)] >= 0).sum() == 51 and (slot_of[: sum(padded)] == -1).sum() == sum(padded) - 51
    assert (slot_of[sum(padded) :] >= 0).all()
    if name == "triton":
        check_tiles(tiles, padded, [0, padded[0], padded[0]])


@pytest.mark.parametrize("sizes", [[0, 1, 7, 8], [31, 33, 0], [0, 0], [5], [16, 0, 48]])
def test_tiles_of_foreign_offsets(sizes):
    offsets = torch.tensor(sizes).cumsum(0).int()
    check_tiles(by_triton(tiles_of, offsets, sum(sizes) + 3), sizes, [0, *offsets.tolist()[:-1]])


def rows_and_map(T=9, K=3, E=5, D=70, dtype=torch.float32):
    torch.manual_seed(0)
    ids = random_ids(T, K, E, empty=0.3)
    _, (slot_of, row_of, offsets, tiles) = make(ids, E)
    y = torch.randn(T * K + 1, D, dtype=torch.float64).to(dtype)
    y[offsets[-1] :] = float("nan")
    used = [[r for r in row if r < offsets[-1]] for row in row_of.tolist()]
    return y, row_of, used, RouteMap(slot_of, row_of, offsets, K, tiles)


def summed(y, used, addend=None):
    out = torch.stack([y[rows].double().sum(0) for rows in used])
    return out if addend is None else out + addend.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_combine_is_within_one_rounding(dtype):
    """The spare row and the unused ones hold NaN: the kernel reads none of them."""
    y, row_of, used, _ = rows_and_map(dtype=dtype)
    addend = torch.randn(9, 70).to(dtype)
    within_one_rounding(by_triton(sum_rows, y, row_of), summed(y, used), slack=1e-6)
    within_one_rounding(by_triton(sum_rows, y, row_of, addend), summed(y, used, addend), slack=1e-6)


def test_combine_in_float64():
    y, row_of, used, _ = rows_and_map(dtype=torch.float64)
    torch.testing.assert_close(by_triton(sum_rows, y, row_of), summed(y, used), atol=1e-14, rtol=0)


def test_combine_reduces_the_gradients_of_the_weights():
    y, row_of, used, map_ = rows_and_map()
    partials = torch.randn(y.shape[0], 4)
    partials[map_.offsets_E[-1] :] = float("nan")
    out, dweights = by_triton(sum_rows_and_weights, y, row_of, partials)
    torch.testing.assert_close(out.double(), summed(y, used), atol=1e-6, rtol=0)
    expected = torch.where(row_of < map_.offsets_E[-1], partials.double().sum(1)[row_of], 0.0)
    torch.testing.assert_close(dweights.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_fault_38_no_tokens(name):
    with backend(name):
        ids = torch.empty(0, 2, dtype=torch.int64)
        _, (slot_of, row_of, offsets, _) = make(ids, 4)
        assert slot_of.shape == (0,) and row_of.shape == (0, 2) and offsets.tolist() == [0] * 4
        y = torch.empty(0, 3, requires_grad=True)
        out = combine(y, RouteMap(slot_of, row_of, offsets, 2))
        out.sum().backward()
        assert out.shape == y.grad.shape == (0, 3)
