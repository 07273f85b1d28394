"""Dispatchers over ranks against one process in float64."""

import pytest
import torch
import torch.distributed as dist
from moe_parity import DISPATCHERS, all_reduce, assert_same, build, data, differences, run, spread

from titan_moe.errors import ConfigError
from titan_moe.moe.dispatch import LocalDispatcher, build_dispatcher, expert_range

LOSSES = {"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.2, "global_aux_loss_coef": 0.3, "z_loss_coef": 0.4}
CASES = {
    "plain": {},
    "sigmoid_bias_groups_shared": {
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "topk_groups": 2,
        "route_scale": 2.5,
        "shared_hidden_dim": 7,
    },
    "all_losses": {**LOSSES, "top_k": 3},
    "gpt_oss": {
        "router_bias": True,
        "activation": "clamped_swiglu",
        "activation_limit": 0.4,
        "expert_linear_bias": True,
    },
    "input_weight_top2_bias": {"weight_on": "input", "expert_linear_bias": True, "activation": "geglu"},
    "relu2_top1": {"top_k": 1, "normalize_weights": False, "activation": "relu2"},
    "all_experts": {"top_k": 8},
    "latent": {"latent_dim": 4, "shared_hidden_dim": 5, "shared_gate": True},
    "sequential": {"experts": "sequential", "expert_linear_bias": True},
    "five_experts": {"num_experts": 5, "expert_linear_bias": True},
    "thirteen_experts": {"num_experts": 13, "top_k": 4},
}

# What a rank does to its own tokens alone: compared with the same layer called once per rank.
PER_RANK = {
    "capacity_probs": {"capacity_factor": 0.7},
    "capacity_position": {"capacity_factor": 0.7, "drop_policy": "position", "expert_linear_bias": True},
    "capacity_padded": {"capacity_factor": 1.2, "pad_to_capacity": True, "expert_linear_bias": True},
    "counts_padded": {"pad_counts_to": 4, "expert_linear_bias": True, "score_function": "sigmoid"},
    "expert_choice": {"selection": "expert_choice", "z_loss_coef": 0.1},
    "expert_choice_counts_padded": {"selection": "expert_choice", "pad_counts_to": 4},
    "sinkhorn": {"selection": "sinkhorn"},
    "round_robin": {"selection": "round_robin"},
}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ranks, name", [(2, "plain"), *((4, name) for name in CASES)])
def test_layer_over_ranks_equals_one_process(run_ranks, name, ranks, dispatcher):
    sizes = [5, 3, 4, 6][:ranks]
    assert_same(run_ranks(ranks, differences, dispatcher, CASES[name], sizes, {"batch": 2}))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("name", list(PER_RANK))
def test_layer_over_ranks_equals_one_call_per_rank(run_ranks, name, dispatcher):
    assert_same(run_ranks(3, differences, dispatcher, PER_RANK[name], [5, 3, 7], {"whole": False}))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_eight_ranks_three_of_them_without_an_expert(run_ranks, dispatcher):
    # Nine experts over eight ranks: 2, 2, 2, 2, 1, 0, 0, 0.
    overrides = {"num_experts": 9, "top_k": 3, "expert_linear_bias": True, **LOSSES}
    assert_same(run_ranks(8, differences, dispatcher, overrides, [3, 1, 4, 2, 5, 0, 2, 6]))


@pytest.mark.parametrize("backend", ["grouped", "sequential"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_fewer_experts_than_ranks(run_ranks, dispatcher, backend):
    overrides = {"num_experts": 3, "expert_linear_bias": True, "experts": backend}
    assert_same(run_ranks(4, differences, dispatcher, overrides, [3, 2, 0, 4]))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_padding_goes_nowhere(run_ranks, dispatcher):
    assert_same(
        run_ranks(
            4, differences, dispatcher, {**LOSSES, "expert_bias": True}, [5, 3, 4, 6], {"batch": 2, "padded": True}
        )
    )


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("sizes", [[0, 0], [0, 1], [1, 0], [0, 7], [1, 1]])
def test_fault_14_few_or_no_tokens_on_a_rank(run_ranks, sizes, dispatcher):
    assert_same(run_ranks(2, differences, dispatcher, {"expert_linear_bias": True, **LOSSES}, sizes))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_fault_14_three_tokens_over_four_ranks_in_two_sequences(run_ranks, dispatcher):
    assert_same(run_ranks(4, differences, dispatcher, LOSSES, [1, 1, 1, 0], {"batch": 2}))


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fault_4_expert_gradients_do_not_depend_on_ep(run_ranks, ranks, dispatcher):
    sizes = [9] if ranks == 1 else [4, 5]
    assert_same(run_ranks(ranks, differences, dispatcher, {}, sizes))


def aux_alone(dispatcher):
    """The router's gradient from the auxiliary losses, and by autograd of the losses in one process."""
    layer = build(**{**LOSSES, "top_k": 2})
    x, _ = data(2, 8, layer.config.dim)
    layer.balance.token_weight = torch.tensor(0.2, dtype=torch.float64)
    local = spread(layer, dispatcher)
    local.balance.reduce_counts = local.balance.share_counts = all_reduce
    mine = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    got = run(local, mine, torch.zeros_like(mine))
    _, aux = layer.route(x.view(-1, x.shape[-1]), None, 2)
    (want,) = torch.autograd.grad(aux, [layer.router.weight])
    experts = [got[name] for name in got if name.startswith("experts.")]
    return all_reduce(got["router.weight"]), want, max(g.abs().max().item() for g in experts)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_fault_13_aux_loss_alone_reaches_the_router(run_ranks, dispatcher):
    for got, want, experts in run_ranks(4, aux_alone, dispatcher):
        assert want.abs().max() > 0.01
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        assert experts == 0


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_fault_7_sequence_loss_of_split_sequences_at_any_micro_batch(run_ranks, batch):
    assert_same(run_ranks(2, differences, "alltoall", {"seq_aux_loss_coef": 0.5}, [3, 4], {"batch": batch}))


def without_token_weight():
    layer = build(aux_loss_coef=0.1, seq_aux_loss_coef=0.2, z_loss_coef=0.3)
    x, _ = data(2, 8, layer.config.dim)
    local = spread(layer, "alltoall")
    local.balance.share_counts = all_reduce
    mine = x.chunk(2, 1)[dist.get_rank()]
    got = run(local, mine, torch.zeros_like(mine))
    want = run(layer, x, torch.zeros_like(x))
    return all_reduce(got["router.weight"]), want["router.weight"]


def test_losses_without_a_token_weight_average_over_the_ranks_that_share_sequences(run_ranks):
    for got, want in run_ranks(2, without_token_weight):
        assert want.abs().max() > 0.01
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def identical_inputs(dispatcher):
    """All ranks hold the same bfloat16 tokens. What they get, their weights, and the weights their experts saw."""
    layer = build(torch.bfloat16, top_k=3)
    local = spread(layer, dispatcher)
    x, dy = data(1, 6, layer.config.dim, torch.bfloat16)
    seen = []

    def see(_, args):
        _, counts, weights, map_ = args
        rows = weights if map_ is None else weights.flatten()[map_.slot_of_R]
        seen.append(rows[: counts.sum()].detach())

    local.experts.register_forward_pre_hook(see)
    got = run(local, x, dy)
    routing, _ = layer.route(x[0], None, 1)
    first, last = expert_range(8, dist.get_world_size(), dist.get_rank())
    here = (routing.expert_ids_TK >= first) & (routing.expert_ids_TK < last)
    return got, routing.weights_TK[here].detach(), seen[0]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_fault_20_identical_inputs_on_all_ranks_give_identical_outputs(run_ranks, dispatcher):
    results = run_ranks(4, identical_inputs, dispatcher)
    for got, sent, seen in results:
        # Every bit of fp32 arrives: each weight once from each of the four ranks.
        assert sent.dtype == seen.dtype == torch.float32
        assert torch.equal(seen.sort().values, sent.repeat(4).sort().values)
        for name in ("y", "x", "weights", "router.weight"):
            assert torch.equal(got[name], results[0][0][name]), name


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_bfloat16_layer_is_the_float64_layer_to_rounding(run_ranks, dispatcher):
    want = build(top_k=3)
    x, dy = data(1, 6, want.config.dim, torch.bfloat16)
    rounded = build(torch.bfloat16, top_k=3)
    # Both use the rounded weights and inputs; the routing is then alike.
    want.load_state_dict(rounded.state_dict())
    expected = run(want, x.double(), dy.double())
    for got, _, _ in run_ranks(2, identical_inputs, dispatcher):
        # Three roundings to 8 bits along chains whose terms reach ten times the result.
        for name in ("y", "x", "weights"):
            error = (got[name].double() - expected[name]).norm() / expected[name].norm()
            assert error < 0.02, (name, error)


def forced(dispatcher):
    """All tokens to two experts of one rank."""
    layer = build(expert_bias=True, score_function="sigmoid", expert_linear_bias=True)
    layer.router.expert_bias.copy_(torch.tensor([0.0, 0, 0, 9, 9, 0, 0, 0]))
    local = spread(layer, dispatcher)
    sizes = [3, 4, 2, 5]
    x, dy = data(1, sum(sizes), layer.config.dim)
    mine = [t.split(sizes, 1)[dist.get_rank()] for t in (x, dy)]
    got, want = run(local, *mine), run(layer, x, dy)
    first, last = expert_range(8, 4, dist.get_rank())
    for name in ("w1", "w2", "b1", "b2"):
        torch.testing.assert_close(got[f"experts.{name}"], want[f"experts.{name}"][first:last], atol=1e-10, rtol=0)
    return {name: got[f"experts.{name}"].abs().max().item() for name in ("w1", "w2", "b1", "b2")}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_experts_and_ranks_without_rows_get_gradients_of_zero(run_ranks, dispatcher):
    results = run_ranks(4, forced, dispatcher)
    assert all(value == 0 for rank in (0, 3) for value in results[rank].values())
    assert all(value > 0 for rank in (1, 2) for value in results[rank].values())


def twice(dispatcher):
    layer = build(torch.float32, top_k=3, expert_linear_bias=True)
    x, dy = data(1, 12, layer.config.dim, torch.float32)
    local = spread(layer, dispatcher, etp=2)
    runs = [run(local, *(t.chunk(4, 1)[dist.get_rank()] for t in (x, dy))) for _ in range(2)]
    return all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0] if n != "counts")


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_two_runs_are_bitwise_equal(run_ranks, dispatcher):
    assert all(run_ranks(4, twice, dispatcher))


def equal_tokens(sizes):
    out = differences("allgather", {**LOSSES, "expert_linear_bias": True}, sizes, {"options": {"equal_tokens": True}})
    dispatcher = build_dispatcher("allgather", num_experts=8, ep_group=dist.group.WORLD, equal_tokens=True)
    return out, dispatcher.host_syncs


def test_allgather_of_equal_tokens_needs_no_host(run_ranks):
    results = run_ranks(2, equal_tokens, [4, 4])
    assert_same([out for out, _ in results])
    assert all(syncs == 0 for _, syncs in results)


def no_gradient(dispatcher):
    layer = build()
    local = spread(layer, dispatcher)
    x, _ = data(1, 6, layer.config.dim)
    mine = x.chunk(2, 1)[dist.get_rank()]
    with torch.no_grad():
        inference = (local(mine) - layer(x).chunk(2, 1)[dist.get_rank()]).abs().max().item()
    # The first layer of a model has an input without gradient.
    layer(x).sum().backward()
    local(mine).sum().backward()
    first, last = expert_range(8, 2, dist.get_rank())
    return inference, (local.experts.w1.grad - layer.experts.w1.grad[first:last]).abs().max().item()


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_inputs_without_gradient_and_no_grad(run_ranks, dispatcher):
    assert all(max(pair) < 1e-10 for pair in run_ranks(2, no_gradient, dispatcher))


def recomputed(dispatcher):
    """The layer under both kinds of checkpointing."""
    layer = build(**LOSSES)
    x, dy = (t.chunk(2, 1)[dist.get_rank()] for t in data(2, 8, layer.config.dim))
    results = []
    for reentrant in (None, False, True):
        local = spread(layer, dispatcher)
        local.balance.reduce_counts = local.balance.share_counts = all_reduce
        leaf = x.clone().requires_grad_()
        if reentrant is None:
            y = local(leaf)
        else:
            y = torch.utils.checkpoint.checkpoint(local, leaf, use_reentrant=reentrant)
        y.backward(dy)
        balance = local.balance
        results.append([y.detach(), leaf.grad, *(p.grad for p in local.parameters()), balance.counts_E])
    return [all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)) for other in results[1:]]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_fault_15_recompute_over_ranks_changes_nothing(run_ranks, dispatcher):
    assert all(all(equal) for equal in run_ranks(2, recomputed, dispatcher))


def test_experts_are_cut_as_torch_chunks_them():
    for experts in range(1, 20):
        for ranks in range(1, 9):
            whole = torch.arange(experts)
            chunks = [c.tolist() for c in whole.chunk(ranks)]
            chunks += [[]] * (ranks - len(chunks))
            assert [list(range(*expert_range(experts, ranks, r))) for r in range(ranks)] == chunks


def test_one_rank_needs_no_travel():
    for name in ("local", "allgather", "alltoall", "deepep"):
        assert type(build_dispatcher(name, num_experts=4)) is LocalDispatcher


def refused(name):
    try:
        build_dispatcher(name, num_experts=8, ep_group=dist.group.WORLD)
    except ConfigError as error:
        return str(error)
    return None


def test_local_over_ranks_and_unknown_names_are_refused(run_ranks):
    for text in run_ranks(2, refused, "local"):
        assert "'local' with experts spread over 2 ranks" in text and "'alltoall'" in text
    with pytest.raises(ConfigError, match=r"'alltoal' is not known\. Did you mean 'alltoall'"):
        build_dispatcher("alltoal", num_experts=4)
