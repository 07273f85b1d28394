"""The route map and the six stages of the local dispatcher."""

import pytest
import torch

from titan_moe.errors import ConfigError
from titan_moe.kernels.combine import combine
from titan_moe.kernels.route_map import route_map
from titan_moe.moe.dispatch import LocalDispatcher, build_dispatcher
from titan_moe.moe.routing import Routing, count_experts

STAGES = [
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
]


def make_routing(T, K, E, seed=0, max_rows=None, dtype=torch.float64):
    """Random distinct experts per token, a third of the slots empty."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E, generator=generator).topk(K, dim=1).indices
    empty = torch.rand(T, K, generator=generator) < 1 / 3
    ids = torch.where(empty, -1, ids)
    weights = torch.where(empty, 0.0, torch.rand(T, K, generator=generator, dtype=dtype)).requires_grad_()
    counts = count_experts(ids, E)
    return Routing(ids, weights, counts, T * K if max_rows is None else max_rows(counts))


def order_by_hand(ids):
    """Slots (t, k) by expert, then token, then k."""
    slots = [(e, t, k) for t, row in enumerate(ids.tolist()) for k, e in enumerate(row) if e >= 0]
    return sorted(slots)


@pytest.mark.parametrize("max_rows", [None, lambda counts: int(counts.sum())], ids=["all-slots", "exact"])
@pytest.mark.parametrize("T, K, E", [(1, 1, 1), (5, 2, 4), (17, 3, 8), (8, 8, 8)])
def test_rows_are_ordered_by_expert_then_token_then_k(T, K, E, max_rows):
    routing = make_routing(T, K, E, seed=T, max_rows=max_rows)
    map_ = route_map(routing.expert_ids_TK, routing.counts_E, routing.max_rows)
    expected = order_by_hand(routing.expert_ids_TK)
    used = len(expected)
    R = routing.max_rows + 1
    assert map_.token_of_R.shape == map_.slot_of_R.shape == (R,)
    assert map_.token_of_R[:used].tolist() == [t for _, t, _ in expected]
    assert map_.slot_of_R[:used].tolist() == [t * K + k for _, t, k in expected]
    ends = [sum(e <= last for e, _, _ in expected) for last in range(E)]
    assert map_.offsets_E.tolist() == ends and map_.offsets_E.dtype == torch.int32
    row_of = torch.full((T, K), R - 1)
    for row, (_, t, k) in enumerate(expected):
        row_of[t, k] = row
    assert torch.equal(map_.row_of_TK, row_of)
    assert (map_.token_of_R < T).all() and (map_.token_of_R >= 0).all()


def test_fault_34_44_0_7_padded_to_the_alignment_and_back_is_the_identity():
    ids = torch.tensor([0] * 44 + [2] * 7).view(-1, 1)[torch.randperm(51, generator=torch.Generator().manual_seed(0))]
    x = torch.randn(51, 4, dtype=torch.float64)
    dispatcher = LocalDispatcher()
    for aligned in (51, 64, 96):  # more rows than slots in use, as padding to an alignment gives
        padding = torch.full((51, 1), -1)
        all_ids = ids if aligned == 51 else torch.cat([ids, padding], dim=1)
        routing = Routing(all_ids, (all_ids >= 0).double(), count_experts(all_ids, 3), aligned)
        dispatched = dispatcher.dispatch(x, routing)
        assert dispatched.route_map.offsets_E.tolist() == [44, 44, 51]
        rows = dispatched.x[dispatched.route_map.token_of_R].clone()
        rows[51:] = float("nan")
        rows[-1] = 0
        assert torch.equal(combine(rows, dispatched.route_map), x)


def test_stages_chain_to_dispatch_and_combine():
    routing = make_routing(9, 2, 4)
    x = torch.randn(9, 3, dtype=torch.float64)
    dispatcher = LocalDispatcher()
    state = dispatcher.dispatch_preprocess(x, routing)
    state = dispatcher.dispatch_postprocess(dispatcher.token_dispatch(state))
    whole = dispatcher.dispatch(x, routing)
    assert torch.equal(state.weights, whole.weights)
    y = torch.randn(9, 3, dtype=torch.float64)
    out = dispatcher.combine_preprocess(y, state)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(out, state), state)
    assert torch.equal(out, dispatcher.combine(y, whole)) and torch.equal(out, y)
    assert all(callable(getattr(dispatcher, stage)) for stage in STAGES)


def test_weights_follow_their_rows_and_gradients_come_back():
    routing = make_routing(9, 2, 4)
    dispatched = LocalDispatcher().dispatch(torch.randn(9, 3), routing)
    slots = order_by_hand(routing.expert_ids_TK)
    used = len(slots)
    weights_R = dispatched.weights.flatten()[dispatched.route_map.slot_of_R]
    assert weights_R[:used].tolist() == [routing.weights_TK[t, k].item() for _, t, k in slots]
    dweights = torch.zeros_like(weights_R)
    dweights[:used] = torch.arange(1, used + 1)
    (got,) = torch.autograd.grad(weights_R, routing.weights_TK, dweights)
    expected = torch.zeros(9, 2, dtype=torch.float64)
    for row, (_, t, k) in enumerate(slots):
        expected[t, k] = row + 1
    assert torch.equal(got, expected)


def test_fault_38_no_tokens():
    routing = make_routing(0, 2, 4)
    dispatcher = LocalDispatcher()
    dispatched = dispatcher.dispatch(torch.empty(0, 3), routing)
    assert dispatched.route_map.slot_of_R.shape == (0,) and dispatched.route_map.offsets_E.tolist() == [0, 0, 0, 0]
    assert dispatcher.combine(torch.empty(0, 3), dispatched).shape == (0, 3)


def test_no_slot_has_an_expert():
    ids = torch.full((3, 2), -1)
    routing = Routing(ids, torch.zeros(3, 2), count_experts(ids, 4), 6)
    dispatched = LocalDispatcher().dispatch(torch.randn(3, 5), routing)
    y = torch.full((7, 5), float("nan"))
    y[-1] = 0
    assert torch.equal(combine(y, dispatched.route_map), torch.zeros(3, 5))


def test_unknown_dispatcher_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'lokal' is not known\. Did you mean 'local'"):
        build_dispatcher("lokal", num_experts=4)
