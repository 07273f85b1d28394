"""Experts split over etp ranks against one process in float64."""

import pytest
import torch
import torch.distributed as dist
from moe_parity import DISPATCHERS, all_reduce, assert_same, build, data, differences, expert_slice, run, spread

pytestmark = pytest.mark.slow

BIASED = {"expert_linear_bias": True, "router_bias": True}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ranks, etp", [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_layer_with_split_experts_equals_one_process(run_ranks, ranks, etp, dispatcher):
    sizes = [5, 3, 0, 6, 2, 4, 1, 3][:ranks]
    overrides = {**BIASED, "top_k": 3, "aux_loss_coef": 0.2}
    assert_same(run_ranks(ranks, differences, dispatcher, overrides, sizes, {"etp": etp}))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    "overrides",
    [
        {"weight_on": "input", **BIASED},
        {"num_experts": 5, "activation": "relu2", **BIASED},
        {"num_experts": 1, "top_k": 1, "normalize_weights": False, **BIASED},
        {"experts": "sequential", **BIASED},
        {"hidden_dim": 7},
        {"save": "input", **BIASED},
        {"latent_dim": 4, "shared_hidden_dim": 5},
    ],
    ids=["weight_on_input", "five_experts", "one_expert", "sequential", "uneven_hidden", "save_input", "latent_shared"],
)
def test_variants_with_split_experts(run_ranks, overrides, dispatcher):
    assert_same(run_ranks(4, differences, dispatcher, overrides, [4, 1, 5, 2], {"etp": 2}))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("overrides", [{"capacity_factor": 0.7}, {"selection": "expert_choice"}, {"pad_counts_to": 4}])
def test_slots_of_all_kinds_with_split_experts(run_ranks, overrides, dispatcher):
    assert_same(run_ranks(4, differences, dispatcher, overrides, [4, 6, 5, 2], {"etp": 2, "whole": False}))


def stepped(dispatcher):
    """One step of gradient descent with ep 1, etp 2 in two replicas, and in one process."""
    layer = build(**BIASED)
    rank = dist.get_rank()
    x, dy = data(1, 12, layer.config.dim)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    local = spread(layer, dispatcher, etp=2, group=pairs[rank // 2])
    got = run(local, *(t.chunk(4, 1)[rank] for t in (x, dy)))
    want = run(layer, x, dy)
    after, expected = {}, {}
    for name, parameter in local.named_parameters():
        gradient = got[name]
        if name.startswith("experts."):
            dist.all_reduce(gradient, group=across[rank % 2])
            if name == "experts.b2":
                dist.all_reduce(gradient, group=pairs[rank // 2])
            whole = expert_slice(want[name], name.removeprefix("experts."), 1, 2, rank % 2)
        else:
            all_reduce(gradient)
            whole = want[name]
        after[name] = (parameter - 0.1 * gradient).detach()
        expected[name] = (parameter - 0.1 * whole).detach()
    return after, expected


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_fault_10_replicas_of_split_experts_stay_bitwise_equal(run_ranks, dispatcher):
    results = run_ranks(4, stepped, dispatcher)
    for rank, (after, expected) in enumerate(results):
        for name, value in after.items():
            torch.testing.assert_close(value, expected[name], atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
            twin = rank % 2 if name in ("experts.w1", "experts.w2", "experts.b1") else 0
            assert torch.equal(value, results[twin][0][name]), (rank, name)


def test_fault_25_output_bias_of_split_experts_counts_once(run_ranks):
    # With all weights zero the output is the sum of the routing weights times b2.
    for y, want in run_ranks(2, bias_alone):
        torch.testing.assert_close(y, want, atol=1e-12, rtol=0)


def bias_alone():
    layer = build(expert_linear_bias=True)
    for name in ("w1", "w2", "b1"):
        torch.nn.init.zeros_(getattr(layer.experts, name))
    local = spread(layer, "alltoall", etp=2)
    x, dy = data(1, 6, layer.config.dim)
    mine = [t.chunk(2, 1)[dist.get_rank()] for t in (x, dy)]
    routing, _ = layer.route(mine[0][0], None, 1)
    want = (routing.weights_TK[..., None] * layer.experts.b2[routing.expert_ids_TK]).sum(1)
    return run(local, *mine)["y"][0], want.detach()
