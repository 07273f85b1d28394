"""Drops and zero-weight slots against loops over experts."""

import math
from fractions import Fraction

import oracle_routing as oracle
import pytest
import torch

from titan_moe.moe.balance import Balance
from titan_moe.moe.capacity import apply_capacity, capacity, pad_counts, valid_capacity
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router
from titan_moe.moe.routing import Routing, count_experts

torch.set_num_threads(1)
T, D, E, K = 24, 6, 8, 2


def make(**fields):
    torch.manual_seed(0)
    config = MoEConfig(**{"dim": D, "hidden_dim": 4, "num_experts": E, "top_k": K, **fields})
    router = Router(config).double()
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        x += router.weight[0] * 2  # Crowd some experts.
    return router, Balance(config), x


def routing_of(ids: list[list[int]], weights: list[list[float]], num_experts: int) -> Routing:
    ids_TK = torch.tensor(ids)
    return Routing(
        ids_TK, torch.tensor(weights, dtype=torch.float64), count_experts(ids_TK, num_experts), ids_TK.numel()
    )


def dense(routing: Routing, num_experts: int = E) -> torch.Tensor:
    used = routing.expert_ids_TK >= 0
    zeros = torch.zeros(used.shape[0], num_experts, dtype=torch.float64)
    return zeros.scatter_add(1, routing.expert_ids_TK.clamp_min(0), routing.weights_TK * used)


def tokens(routing: Routing, expert: int) -> list[int]:
    return [t for t, ids in enumerate(routing.expert_ids_TK.tolist()) if expert in ids]


def test_position_policy_keeps_exactly_the_first_tokens():
    config = MoEConfig(D, 4, 2, 1, score_function="sigmoid", capacity_factor=1.0, drop_policy="position")
    routing = routing_of([[0]] * 6, [[0.1], [0.2], [0.3], [0.4], [0.5], [0.6]], 2)
    kept = apply_capacity(routing, config)
    assert kept.expert_ids_TK.tolist() == [[0], [0], [0], [-1], [-1], [-1]]
    assert kept.weights_TK.flatten().tolist() == [0.1, 0.2, 0.3, 0, 0, 0]
    assert kept.counts_E.tolist() == [3, 0]


def test_probs_policy_keeps_the_highest_weights_and_ties_keep_the_lower_token():
    config = MoEConfig(D, 4, 2, 1, score_function="sigmoid", capacity_factor=1.0)
    kept = apply_capacity(routing_of([[0]] * 6, [[0.5], [0.2], [0.5], [0.9], [0.5], [0.1]], 2), config)
    assert tokens(kept, 0) == [0, 2, 3]
    kept = apply_capacity(routing_of([[0]] * 6, [[0.5], [math.nan], [0.5], [0.9], [0.5], [0.1]], 2), config)
    assert tokens(kept, 0) == [0, 1, 3]  # NaN stays, so that divergence shows.


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("factor", [0.3, 0.75, 1.0, 1.5, 8.0])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.usefixtures("kernels")
def test_capacity_equals_the_loop_over_experts_with_gradients(policy, factor, padding, pad):
    router, balance, x = make(capacity_factor=factor, drop_policy=policy, pad_to_capacity=pad)
    valid = torch.arange(T) % 4 != 2 if padding else None
    routing, _ = router(x, balance, valid)
    kept = apply_capacity(routing, router.config, valid)

    real = T if valid is None else int(valid.sum())
    limit = math.ceil(real * K / E * factor)
    routed = oracle.route(x @ router.weight.T, router.config, None, valid)
    want = oracle.drop(routed, E, limit, policy)
    # Values, and no renormalising: a token's kept weights are what they were.
    torch.testing.assert_close(dense(kept), oracle.dense(want, E), rtol=1e-10, atol=1e-13)
    probe = torch.randn(T, E, dtype=torch.float64)
    got_grad = torch.autograd.grad((dense(kept) * probe).sum(), router.weight)[0]
    want_grad = torch.autograd.grad((oracle.dense(want, E) * probe).sum(), router.weight)[0]
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-10, atol=1e-13)

    rows = min(T, math.ceil(T * K / E * factor))
    for e in range(E):
        by_oracle = [t for t, row in enumerate(want) if e in row]
        if pad:
            order = sorted(range(T), key=lambda t: valid is not None and not valid[t])
            free = [t for t in order if t not in by_oracle]
            by_oracle = sorted(by_oracle + free[: rows - len(by_oracle)])
            assert len(by_oracle) == rows
        assert tokens(kept, e) == by_oracle
        assert kept.counts_E[e] == len(by_oracle)
    assert kept.counts_E.sum() <= kept.max_rows <= kept.expert_ids_TK.numel()
    if pad:
        assert kept.max_rows == E * rows and kept.expert_ids_TK.shape == (T, E)
    if factor < 1:
        assert sum(map(len, want)) < sum(map(len, routed))
    dropped = sum(map(len, routed)) - sum(map(len, want))
    assert balance.dropped == dropped


def test_padding_does_not_raise_the_capacity():
    router, balance, x = make(capacity_factor=0.75)
    valid = torch.arange(T) < T // 2
    kept = apply_capacity(router(x, balance, valid)[0], router.config, valid)
    alone = apply_capacity(router(x[: T // 2], balance)[0], router.config)
    assert torch.equal(kept.expert_ids_TK[: T // 2], alone.expert_ids_TK)
    assert (kept.expert_ids_TK[T // 2 :] == -1).all()


def test_without_a_capacity_nothing_changes():
    router, balance, x = make()
    routing, _ = router(x, balance)
    assert apply_capacity(routing, router.config) is routing and pad_counts(routing, 1) is routing
    assert balance.dropped == 0


@pytest.mark.parametrize("factor,want", [(1.0, 6), (1.1, 7), (0.01, 1), (100.0, T)])
def test_capacity_is_the_ceiling_and_at_most_all_tokens(factor, want):
    assert capacity(T, K, E, factor) == want


@pytest.mark.parametrize("factor", ["1.1", "1", "0.7", "0.000001", "0.000000001", "1.000001", "2.3", "1.15", "1e300"])
@pytest.mark.parametrize("K, E", [(2, 4), (1, 7), (8, 256), (3, 3)])
def test_capacity_is_exact_on_host_and_device(factor, K, E):
    assert capacity(100, 2, 4, 1.1) == 55  # 100 * 2 / 4 * 1.1 is 55.00000000000001 in floating point.
    for tokens in (0, 1, 7, 100, 700, 4096):
        # In decimals, which is what the user wrote.
        want = min(tokens, math.ceil(Fraction(factor) * tokens * K / E))
        assert capacity(tokens, K, E, float(factor)) == want
        valid = torch.arange(2 * tokens + 1) < tokens
        rows = valid_capacity(2 * tokens + 1, valid, K, E, float(factor))
        assert rows.dtype == torch.int64 and rows.item() == want


def test_a_factor_without_decimals_counts_as_the_fraction_it_stands_for():
    # 5/3 is rounded up in floating point.
    assert capacity(6, 1, 2, 5 / 3) == 5 and capacity(6, 1, 2, 1 / 3) == 1


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("multiple", [2, 8, 12])
@pytest.mark.parametrize("selection", ["top_k", "expert_choice"])
def test_pad_counts_rounds_every_count_up_with_zero_weight_on_the_first_free_tokens(selection, multiple, padding):
    router, balance, x = make(selection=selection)
    valid = torch.arange(T) >= 3 if padding else None
    routing, _ = router(x, balance, valid)
    padded = pad_counts(routing, multiple, valid)
    assert padded.expert_ids_TK.shape == (T, E)
    assert torch.equal(dense(padded), dense(routing))
    for e in range(E):
        before = tokens(routing, e)
        after = math.ceil(len(before) / multiple) * multiple
        order = sorted(range(T), key=lambda t: valid is not None and not valid[t])
        free = [t for t in order if t not in before][: after - len(before)]
        assert tokens(padded, e) == sorted(before + free)
        assert padded.counts_E[e] == after and after % multiple == 0
    assert padded.counts_E.sum() <= padded.max_rows
    probe = torch.randn(T, E, dtype=torch.float64)
    got = torch.autograd.grad((dense(padded) * probe).sum(), x, retain_graph=True)[0]
    assert torch.equal(got, torch.autograd.grad((dense(routing) * probe).sum(), x)[0])


def test_pad_counts_leaves_empty_experts_empty_and_stops_at_all_tokens():
    padded = pad_counts(routing_of([[0], [0], [0], [1], [0]], [[1.0]] * 5, 3), 4)
    assert padded.counts_E.tolist() == [4, 4, 0]
    assert tokens(padded, 0) == [0, 1, 2, 4] and tokens(padded, 1) == [0, 1, 2, 3]
    stopped = pad_counts(routing_of([[0], [0], [0], [1], [0]], [[1.0]] * 5, 3), 16)
    assert stopped.counts_E.tolist() == [5, 5, 0] and stopped.max_rows == 15


def test_rounding_counts_up_after_padding_to_capacity_uses_each_token_once():
    router, balance, x = make(capacity_factor=0.75, pad_to_capacity=True)
    valid = torch.arange(T) % 8 == 0
    full = apply_capacity(router(x, balance, valid)[0], router.config, valid)
    padded = pad_counts(full, 4, valid)
    assert (full.expert_ids_TK[~valid] >= 0).any()  # The first fill has used padding.
    rows = math.ceil(T * K / E * 0.75 / 4) * 4
    assert padded.counts_E.tolist() == [rows] * E
    assert [len(tokens(padded, e)) for e in range(E)] == [rows] * E
    assert torch.equal(dense(padded), dense(full))


def test_fault_38_capacity_without_tokens():
    router, balance, _ = make(capacity_factor=1.0, pad_to_capacity=True)
    x = torch.zeros(0, D, dtype=torch.float64)
    kept = pad_counts(apply_capacity(router(x, balance)[0], router.config), 16)
    assert kept.counts_E.tolist() == [0] * E and kept.weights_TK.shape == (0, E) and kept.max_rows == 0


def test_count_experts_ignores_empty_slots():
    assert count_experts(torch.tensor([[0, -1], [2, 2], [-1, -1]]), 4).tolist() == [1, 0, 2, 0]
