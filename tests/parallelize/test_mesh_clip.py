"""The gradient norm over both meshes and pipeline stages: every element counts once, wherever its copies are."""

from math import inf

import pytest
import torch
import torch.distributed as dist
from folded_net import Net, fold, layout, shard
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_moe.optim import clip_grad_norm


def constant_gradients(degrees, value, norm_type):
    """Norm when every element's gradient is ``value``, and the number of elements of the whole model."""
    meshes = layout(**degrees)
    net = shard(fold(Net(), meshes), meshes)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)
    pp = meshes.degrees.pp
    norm = clip_grad_norm(net.parameters(), 0, pp=pp, norm_type=norm_type)
    # Every pipeline stage has a model of its own here.
    return norm.item(), pp * sum(parameter.numel() for parameter in Net().parameters())


def stages(copies):
    """Two stages with different parameters on (fsdp, tp), one of which both hold."""
    meshes = layout(pp=2, tp=2)
    stage = meshes.dense["pp"].get_local_rank()
    mesh = meshes.dense["dp_shard", "tp"]
    generator = torch.Generator().manual_seed(7)
    wholes = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(4)]
    kinds = [[Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(1)], [Replicate(), Replicate()]]

    def parameter(whole, placements):
        mesh_sizes = [(p, s, i) for p, s, i in zip(placements, mesh.shape, mesh.get_coordinate(), strict=True)]
        local = whole.clone()
        for placement, size, index in mesh_sizes:
            if placement.is_shard():
                pieces = local.chunk(size, placement.dim)
                local = pieces[index] if index < len(pieces) else local.narrow(placement.dim, 0, 0)
        grad = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad
        return parameter

    own = [parameter(whole * (stage + 1), kind) for whole, kind in zip(wholes, kinds, strict=True)]
    plain = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    plain.grad = torch.full((3,), 1.0 + stage, dtype=torch.float64)
    shared = parameter(wholes[0] * 10, [Shard(0), Replicate()])
    norm = clip_grad_norm([*own, plain, shared], 1.0, pp=2, copies={shared: copies})
    elements = [*(w * s for w in wholes for s in (1, 2)), torch.full((3,), 1.0), torch.full((3,), 2.0)]
    elements += [wholes[0] * 10] * (2 // copies)
    want = torch.cat([e.flatten().double() for e in elements]).norm().item()
    return norm.item(), want, plain.grad[0].item(), (1.0 + stage) / (want + 1e-6)


def extremes():
    """The largest magnitude sits in one stage on one rank; then a NaN does."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([0.5, -(rank + 1.0), 0.0, 1.0])
    largest = clip_grad_norm([parameter], 0, pp=4, norm_type=inf).item()
    if rank == 2:
        parameter.grad[1] = torch.nan
    return largest, clip_grad_norm([parameter], 0, pp=4, norm_type=inf).item()


def nothing_here():
    """A rank whose stage has no gradient still joins."""
    parameter = nn.Parameter(torch.zeros(4))
    if dist.get_rank() == 1:
        parameter.grad = torch.full((4,), 2.0)
    return clip_grad_norm([parameter], 0, pp=2).item()


@pytest.mark.parametrize(
    "degrees",
    [
        {"dps": 4, "tp": 2, "ep": 2},
        {"tp": 2, "ep": 8},
        {"tp": 4, "ep": 2, "etp": 2},
        {"dpr": 2, "tp": 2, "ep": 4},
        {"dpr": 4, "ep": 2},
        {"dpr": 8, "ep": 8},
        {"etp": 4, "tp": 2},
        {"pp": 2, "tp": 2, "ep": 2},
    ],
    ids=str,
)
def test_fault_10_gradients_of_one_count_every_expert_once(run_ranks, degrees):
    for norm, elements in run_ranks(8, constant_gradients, degrees, 1.0, 2.0):
        assert norm == pytest.approx(elements**0.5, rel=1e-14)


def test_other_norms(run_ranks):
    for norm, elements in run_ranks(8, constant_gradients, {"tp": 2, "ep": 2}, -2.0, 1.0):
        assert norm == pytest.approx(2 * elements, rel=1e-14)
    assert run_ranks(8, constant_gradients, {"tp": 2, "ep": 2}, -2.0, inf)[5][0] == 2.0


@pytest.mark.parametrize("copies", [1, 2])
def test_stages_add_and_a_parameter_that_both_hold_counts_once(run_ranks, copies):
    for norm, want, clipped, expected in run_ranks(8, stages, copies):
        assert norm == pytest.approx(want, rel=1e-13) and clipped == pytest.approx(expected, rel=1e-13)


def test_the_infinity_norm_finds_the_one_rank_that_has_it(run_ranks):
    assert run_ranks(4, extremes) == [(4.0, inf)] * 4


def test_a_stage_without_gradients_joins(run_ranks):
    assert run_ranks(2, nothing_here) == [4.0, 4.0]
