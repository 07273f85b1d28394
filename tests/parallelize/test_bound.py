"""``moe.recv_capacity_factor``: no shape follows the routing, and passing the bound is noticed."""

import math

import pytest
import torch
import torch.distributed as dist
from moe_parity import DISPATCHERS, assert_same, build, data, differences, run, spread

from titan_moe.config.job import JobConfig
from titan_moe.errors import ConfigError
from titan_moe.moe.bound import bounded_dispatchers, take_overflow, unbounded
from titan_moe.parallelize import check_run

LOSSES = {"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.2, "global_aux_loss_coef": 0.3, "z_loss_coef": 0.4}
# Room for all rows at one rank, whatever the routing.
WIDE = {"options": {"recv_capacity_factor": 16.0}}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "overrides",
    [
        {**LOSSES, "expert_linear_bias": True, "top_k": 3},
        {"num_experts": 5, "weight_on": "input"},
        {"latent_dim": 4, "shared_hidden_dim": 5, "expert_bias": True, "score_function": "sigmoid"},
    ],
    ids=["losses_biases", "five_experts", "latent_shared"],
)
def test_layer_with_a_bound_equals_one_process(run_ranks, overrides, dispatcher):
    assert_same(run_ranks(4, differences, dispatcher, overrides, [4, 4, 4, 4], {"batch": 2, **WIDE}))


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_split_experts_with_a_bound(run_ranks, dispatcher):
    overrides = {"expert_linear_bias": True, "top_k": 3}
    assert_same(run_ranks(4, differences, dispatcher, overrides, [4, 4, 4, 4], {"etp": 2, **WIDE}))


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "overrides", [{"capacity_factor": 0.7}, {"selection": "expert_choice"}, {"pad_counts_to": 4}], ids=str
)
def test_slots_of_all_kinds_with_a_bound(run_ranks, overrides, dispatcher):
    assert_same(run_ranks(2, differences, dispatcher, overrides, [5, 5], {"whole": False, **WIDE}))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ranks, sizes", [(2, [0, 0]), (4, [1, 1, 1, 1])])
def test_fault_14_few_or_no_tokens_with_a_bound(run_ranks, ranks, sizes, dispatcher):
    # Three experts over four ranks: one rank has none.
    overrides = {"expert_linear_bias": True, "num_experts": 3}
    assert_same(run_ranks(ranks, differences, dispatcher, overrides, sizes, WIDE))


def at_the_bound(dispatcher, factor):
    """Every token to the two experts of rank 1 out of four: whether a bound is passed, and what comes out."""
    layer = build(expert_bias=True, score_function="sigmoid")
    layer.router.expert_bias.copy_(torch.tensor([0.0, 0, 9, 9, 0, 0, 0, 0]))
    x, dy = data(1, 24, layer.config.dim)
    mine = [t.chunk(4, 1)[dist.get_rank()] for t in (x, dy)]
    exact = run(spread(layer, dispatcher), *mine)
    local = spread(layer, dispatcher, recv_capacity_factor=factor)
    assert local.dispatcher.host_syncs == 0
    got = run(local, *mine)
    bounded = bounded_dispatchers(local)
    over = take_overflow(bounded, torch.device("cpu"))
    dist.all_reduce(over := over.int())
    local.balance.reset()
    with unbounded(bounded):
        assert local.dispatcher.host_syncs == 1
        again = run(local, *mine)
    later = take_overflow(bounded, torch.device("cpu")).item()
    same = {name: torch.equal(again[name], exact[name]) for name in exact}
    finite = all(t.isfinite().all().item() for t in got.values())
    return over.item() > 0, later, all(same.values()), finite, all(torch.equal(got[n], exact[n]) for n in exact)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_passing_the_bound_raises_the_flag_and_a_run_without_it_is_exact(run_ranks, dispatcher):
    # Even routing gives each of four ranks a quarter of all rows; here one gets all.
    for over, later, same, finite, _ in run_ranks(4, at_the_bound, dispatcher, 3.5):
        assert over and same and finite and not later
    for over, later, same, finite, equal in run_ranks(4, at_the_bound, dispatcher, 4.0):
        assert not over and same and finite and not later
        assert equal  # bitwise: rows keep their order


def shapes(dispatcher, factor):
    """Rows that the experts here get room for, for balanced and for skewed routing."""
    found = []
    for skewed in (False, True):
        layer = build(expert_bias=True, score_function="sigmoid")
        layer.router.expert_bias.zero_()
        layer.router.expert_bias[:2] += 9.0 * skewed
        local = spread(layer, dispatcher, recv_capacity_factor=factor)
        # HybridEP orders the rows itself; elsewhere one of them is spare.
        local.experts.register_forward_pre_hook(
            lambda _, args: found.append(args[0].shape[0] if args[3] is None else args[3].slot_of_R.shape[0] - 1)
        )
        local(data(1, 8, layer.config.dim)[0])
    return found


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_room_is_the_share_of_even_routing_times_the_factor(run_ranks, dispatcher):
    T, K, ranks, factor = 8, 2, 4, 1.3
    for balanced, skewed in run_ranks(ranks, shapes, dispatcher, factor):
        # The all-to-all rounds up for each pair of ranks.
        room = ranks * math.ceil(T * K / ranks * factor) if dispatcher == "alltoall" else math.ceil(T * K * factor)
        assert balanced == skewed == room


def test_refusals():
    config = JobConfig()
    config.moe.recv_capacity_factor = 1.5
    with pytest.raises(ConfigError, match=r"recv_capacity_factor = 1.5 without expert parallelism does nothing"):
        check_run(config, 1)
    config.parallelism.expert_parallel_degree = 2
    config.parallelism.tensor_parallel_degree = 2
    config.training.seq_len = 255
    with pytest.raises(ConfigError, match="with 255 tokens of a sequence over tensor_parallel_degree = 2"):
        check_run(config, 2)
    config.moe.recv_capacity_factor = 0.0
    with pytest.raises(ConfigError, match=r"recv_capacity_factor = 0.0: must be finite and more than 0"):
        check_run(config, 2)
