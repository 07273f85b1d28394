"""Tensor parallelism: loss and every rank's part of every gradient as one process's, in float64."""

import pytest
import torch
import torch.distributed as dist
from layouts import TINY, build_tiny, compare, make_batch, train_step
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_moe.config.job import Parallelism
from titan_moe.parallelize import build_meshes, parallelize, plan_for

pytestmark = pytest.mark.slow

TP2 = {"tensor_parallel_degree": 2}
TP4 = {"tensor_parallel_degree": 4}


def assert_equal_to_one_process(results):
    for rank, (loss_error, gradient_error, name) in enumerate(results):
        assert loss_error < 1e-12, (rank, loss_error)
        assert gradient_error < 1e-10, (rank, name, gradient_error)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", TINY)
def test_every_family_on_two_tp_ranks(run_ranks, family, sequence_parallel):
    assert_equal_to_one_process(run_ranks(2, compare, family, TP2, 2, 6, sequence_parallel))


LAYOUTS = {
    "tp4": (4, TP4, 2, 8),
    "tp2_dp2": (4, {**TP2, "data_parallel_shard_degree": 2}, 4, 6),
    "tp2_ep2": (2, {**TP2, "expert_parallel_degree": 2}, 2, 6),
    "tp2_ep4_dp2": (4, {**TP2, "expert_parallel_degree": 4}, 4, 6),
    "tp2_ep2_etp2_dp2": (4, {**TP2, "expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2}, 4, 6),
    "etp2": (2, {"expert_tensor_parallel_degree": 2}, 2, 6),
    "tp2_etp2": (2, {**TP2, "expert_tensor_parallel_degree": 2}, 2, 6),
    "tp4_dp2": (8, {**TP4, "expert_parallel_degree": 2}, 2, 8),
    "tp2_cp2": (4, {**TP2, "context_parallel_degree": 2}, 2, 8),
    "tp2_cp2_dp2_ep4": (8, {**TP2, "context_parallel_degree": 2, "expert_parallel_degree": 4}, 4, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_layouts(run_ranks, family, layout):
    ranks, degrees, rows, seq_len = LAYOUTS[layout]
    assert_equal_to_one_process(run_ranks(ranks, compare, family, degrees, rows, seq_len))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("seq_len", [1, 3, 5, 9])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fault_14_sequences_that_tp_does_not_divide(run_ranks, family, seq_len, sequence_parallel):
    results = run_ranks(4, compare, family, TP4, 1, seq_len, sequence_parallel)
    assert_equal_to_one_process(results)


UNEVEN = {"vocab_size": 31, "ffn_dim": 22, "shared_hidden_dim": 13, "hidden_dim": 11}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_dims_that_do_not_divide(run_ranks, sequence_parallel):
    degrees = {**TP4, "expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2}
    override = (*UNEVEN.items(), ("mtp_own_embeddings", True), ("shared_gate", True), ("latent_dim", 9))
    results = run_ranks(4, compare, "deepseek_v3", degrees, 2, 6, sequence_parallel, False, override)
    assert_equal_to_one_process(results)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_padding_on_some_tp_ranks(run_ranks, sequence_parallel):
    override = tuple({"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.1, "z_loss_coef": 0.01}.items())
    results = run_ranks(4, compare, "glm4_moe", TP4, 3, 5, sequence_parallel, True, override)
    assert_equal_to_one_process(results)


def test_queries_without_a_latent(run_ranks):
    assert_equal_to_one_process(run_ranks(2, compare, "kimi_k2", TP2, 2, 6, True, False, (("q_lora_rank", None),)))


def test_kv_heads_shared_by_several_queries(run_ranks):
    assert_equal_to_one_process(run_ranks(2, compare, "gpt_oss", TP2, 2, 6, True, False, (("num_kv_heads", 2),)))


HSDP = {**TP2, "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "expert_parallel_degree": 2}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_tp_under_hsdp(run_ranks, family):
    assert_equal_to_one_process(run_ranks(8, compare, family, HSDP, 4, 6))


def replicated_after_steps(degrees, steps):
    """Local parts of all parameters that several tp ranks hold whole, after some steps."""
    meshes = build_meshes(Parallelism(**degrees))
    model = parallelize(build_tiny("deepseek_v3"), meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model.layers["1"].mlp.router.weight.to_local().clone()
    for _ in range(steps):
        train_step(model, make_batch(2, 7), slice(None))
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before, model.layers["1"].mlp.router.weight.to_local())
    return {
        name: parameter.to_local().detach()
        for name, parameter in model.named_parameters()
        if parameter.device_mesh.mesh_dim_names[-1] == "tp" and parameter.placements[-1].is_replicate()
    }


def test_fault_1_the_router_is_bitwise_equal_on_all_tp_ranks_after_steps(run_ranks):
    first, *others = run_ranks(4, replicated_after_steps, {**TP4, "expert_parallel_degree": 4}, 3)
    assert {
        "layers.1.mlp.router.weight",
        "mtp.0.layer.mlp.router.weight",
        "norm.weight",
        "mtp.0.eh_proj.weight",
    } <= set(first)
    for other in others:
        assert other.keys() == first.keys()
        for name, weight in first.items():
            assert torch.equal(weight, other[name]), name


def moe_input_gradient(degrees):
    """Relative error of dx and of the router's gradient of one MoE layer, by itself."""
    meshes = build_meshes(Parallelism(**degrees))
    oracle, layer = (build_tiny("deepseek_v3", seq_aux_loss_coef=0.0).layers["1"].mlp for _ in range(2))
    plan = {name: style for name, style in plan_for(layer).items() if ".mlp." in name}
    plan = {pattern.replace("**.mlp.", ""): style for pattern, style in plan.items()}
    matched = {name for name, module in layer.named_modules() if list(module.parameters(recurse=False))}
    parallelize(layer, meshes, {name: plan[name] for name in plan if name in matched})
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    dy = torch.randn(2, 5, 16, dtype=torch.float64)
    want = x.clone().requires_grad_()
    (oracle(want) * dy).sum().backward()
    x.requires_grad_()
    if meshes.degrees.tp == 1:
        # The ranks of an etp group see other tokens each, in the same layer: here rank r takes row r.
        rows = slice(dist.get_rank(), dist.get_rank() + 1)
        (layer(x[rows]) * dy[rows]).sum().backward()
        error = (x.grad[rows] - want.grad[rows]).abs().max()
    else:
        stream = distribute_tensor(x, meshes.dense["tp"], [Shard(1)], src_data_rank=None)
        local = stream.to_local().detach().requires_grad_()
        stream = DTensor.from_local(local, meshes.dense["tp"], [Shard(1)], shape=x.shape, stride=x.stride())
        out = layer(stream)
        assert out.placements == (Shard(1),) and out.shape == x.shape
        pieces = dy.split(3, dim=1)[dist.get_rank()], want.grad.split(3, dim=1)[dist.get_rank()]
        (out.to_local() * pieces[0]).sum().backward()
        error = (local.grad - pieces[1]).abs().max()
    router, of_oracle = layer.router.weight.grad.full_tensor(), oracle.router.weight.grad
    return (error / want.grad.abs().max()).item(), ((router - of_oracle).abs().max() / of_oracle.abs().max()).item()


@pytest.mark.parametrize("degrees", [{"expert_tensor_parallel_degree": 2}, {**TP2, "expert_tensor_parallel_degree": 2}])
def test_fault_2_tp_sharded_experts_give_the_single_rank_dx(run_ranks, degrees):
    for dx_error, router_error in run_ranks(2, moe_input_gradient, degrees):
        assert dx_error < 1e-12 and router_error < 1e-12


def test_fault_3_router_gradient_with_tp_and_without_ep(run_ranks):
    for dx_error, router_error in run_ranks(2, moe_input_gradient, TP2):
        assert dx_error < 1e-12 and router_error < 1e-12


def router_gradient(degrees, coef):
    """Error of the router's gradient, and how much of it the auxiliary loss makes."""
    meshes, batch, rank = build_meshes(Parallelism(**degrees)), make_batch(2, 8), dist.get_rank()
    off = {"mtp_depth": 0, "seq_aux_loss_coef": 0.0}
    plain, oracle, model = (build_tiny("deepseek_v3", **{**off, **on}) for on in ({}, {coef: 0.1}, {coef: 0.1}))
    parallelize(model, meshes)
    train_step(plain, batch, slice(None))
    train_step(oracle, batch, slice(None))
    train_step(model, batch, slice(None), cp=(rank, 2) if meshes.degrees.cp > 1 else (0, 1))
    without, want, got = (m.layers["1"].mlp.router.weight.grad for m in (plain, oracle, model))
    error = (got.full_tensor() - want).abs().max() / want.abs().max()
    return error.item(), ((want - without).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("coef", ["aux_loss_coef", "seq_aux_loss_coef", "global_aux_loss_coef", "z_loss_coef"])
@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_fault_6_auxiliary_losses_under_tp_and_cp(run_ranks, axis, coef):
    for router_error, share in run_ranks(2, router_gradient, {f"{axis}_parallel_degree": 2}, coef):
        assert router_error < 1e-10
        # The loss is large enough to be seen, were it a factor off.
        assert share > 1e-3
