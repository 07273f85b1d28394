"""Muon against a loop over whole matrices in float64, in one process and sharded; and resumed."""

import math

import pytest
import torch
from sharded import LAYOUTS, build, differing, give_grads, part_of, run_steps, values, whole_state
from torch import nn
from torch.distributed.tensor import DTensor

from titan_moe.checkpoint import Checkpointer
from titan_moe.config.job import Optimizer
from titan_moe.distributed import rank
from titan_moe.errors import ConfigError
from titan_moe.optim import build_optimizer
from titan_moe.optim.matrices import plan_matrices
from titan_moe.optim.muon import newton_schulz

RULES = [
    # Two groups of heads, each with 3, 2 and 1 rows.
    {"pattern": "q.weight", "row_blocks": [3, 2, 1], "lr": 0.03},
    {"pattern": "experts.w2", "weight_decay": 0.0},
]


def started(layout=None, dtype=torch.float64, **options):
    net = build(layout, dtype=dtype)
    return net, build_optimizer(net, Optimizer(name="Muon", lr=0.01, groups=RULES, **options))


def orthogonal(matrix, steps=5):
    """The published iteration on one matrix, written out."""
    x = matrix / matrix.norm()
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def cut(name, whole):
    """The matrices of a parameter, as views."""
    if name == "q.weight":
        return [block for half in whole.split(6) for block in half.split([3, 2, 1])]
    return list(whole.flatten(0, -3)) if whole.ndim > 2 else [whole]


def expected(steps, *, scale="match_rms", nesterov=True):
    """Muon's parameters after some steps, by name."""
    net = build()
    want = {n: net.get_parameter(n).detach().clone() for n in ("q.weight", "o.weight", "experts.w1", "experts.w2")}
    sums = {name: torch.zeros_like(value) for name, value in want.items()}
    for step in steps:
        for name, value in want.items():
            grad = values(f"{name} {step}", value.shape)
            sums[name] = 0.95 * sums[name] + grad
            ahead = grad + 0.95 * sums[name] if nesterov else sums[name]
            lr = 0.03 if name == "q.weight" else 0.01
            value *= 1 - lr * (0.0 if name == "experts.w2" else 0.1)
            for target, matrix in zip(cut(name, value), cut(name, ahead), strict=True):
                rows, columns = matrix.shape
                size = 0.2 * max(rows, columns) ** 0.5 if scale == "match_rms" else max(1, rows / columns) ** 0.5
                target -= lr * size * orthogonal(matrix)
    return want


@pytest.mark.parametrize(("scale", "nesterov"), [("match_rms", True), ("spectral", False)])
def test_muon_is_the_published_update_of_every_single_matrix(scale, nesterov):
    net, optimizer = started(muon_scale=scale, muon_nesterov=nesterov)
    run_steps(net, optimizer, range(3))
    for name, want in expected(range(3), scale=scale, nesterov=nesterov).items():
        torch.testing.assert_close(net.get_parameter(name).detach(), want, rtol=0, atol=1e-12, msg=name)


def test_the_rest_is_updated_by_adamw():
    net, optimizer = started()
    other = build()
    adamw = build_optimizer(other, Optimizer(lr=0.01))
    for pair in ((net, optimizer), (other, adamw)):
        run_steps(*pair, range(3))
    for name in ("embed.weight", "norm.weight", "norm.bias", "experts.b1", "lm_head.weight"):
        assert torch.equal(net.get_parameter(name), other.get_parameter(name)), name
    assert not torch.equal(net.o.weight, other.o.weight)


def test_singular_values_come_near_one_whatever_they_were():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 30, generator=generator, dtype=torch.float64)
    for batch in (x, x.mT):
        found = torch.linalg.svdvals(newton_schulz(batch * 1e-5, 5))
        assert found.min() > 0.6 and found.max() < 1.3
        u, _, vh = torch.linalg.svd(batch, full_matrices=False)
        # Singular vectors stay: what is left is diagonal and positive.
        middle = u.mT @ newton_schulz(batch, 5) @ vh.mT
        assert (middle - torch.diag_embed(middle.diagonal(dim1=1, dim2=2))).abs().max() < 1e-10
    assert not newton_schulz(torch.zeros(1, 4, 5), 5).any()


def test_gate_and_up_of_an_expert_and_the_experts_do_not_mix():
    net, optimizer = started()
    give_grads(net, 0)
    net.experts.w1.grad[1:] = 0
    net.experts.w1.grad[0, 1] = 0
    before = net.experts.w1.detach().clone()
    optimizer.step()
    moved = (net.experts.w1.detach() / (1 - 0.01 * 0.1) - before).abs().amax((2, 3)) > 1e-12
    assert moved.tolist() == [[True, False]] + [[False, False]] * 4


def run_layout(layout):
    net, optimizer = started(layout)
    run_steps(net, optimizer, range(3))
    single, other = started()
    run_steps(single, other, range(3))
    worst = 0.0
    for name, want in whole_state(single, other).items():
        got = whole_state(net, optimizer)[name]
        got = got.to_local() if isinstance(got, DTensor) else got
        part = part_of(want, whole_state(net, optimizer)[name])
        if got.numel():
            worst = max(worst, (got - part).abs().max().item())
    return worst, optimizer.muon.work


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process_and_shares_the_work(run_ranks, layout):
    ranks = 3 if layout == "fsdp3" else 4
    results = run_ranks(ranks, run_layout, layout)
    assert max(worst for worst, _ in results) < 1e-10
    plans = [work for _, work in results]
    assert all(plan == plans[0] for plan in plans) and sorted(plans[0]) == list(range(ranks))
    # Multiplications of 15 expert matrices, o and the blocks of q; some ranks have two whole experts, which stay.
    total = 15 * 6 * 8 * 6 + 12 * 8 * 8 + 2 * (3 * 8 * 3 + 2 * 8 * 2 + 8)
    assert sum(plans[0].values()) == total
    assert max(plans[0].values()) <= 1.2 * max(total / ranks, 2 * 3 * 6 * 8 * 6)


def run_work():
    net = build("hsdp2x2")
    tensors = [net.q.weight, net.o.weight, net.experts.w1, net.experts.w2]
    work = {}
    plan = plan_matrices(tensors, [[6], None, None, None], work)
    mine = sum(r * c * min(r, c) for r, c in plan.shapes)
    return mine, work[rank()], len(plan.shapes), plan.travels


def test_each_matrix_has_one_owner(run_ranks):
    results = run_ranks(4, run_work)
    assert all(mine == planned and travels for mine, planned, _, travels in results)
    assert sum(count for _, _, count, _ in results) == 2 + 1 + 10 + 5


def run_experts():
    net = build("fsdp2_tp2_ep4")
    plan = plan_matrices([net.experts.w1, net.experts.w2], [None, None], {})
    return len(plan.shapes), plan.travels, len(plan.own)


def test_whole_experts_do_not_travel(run_ranks):
    assert run_ranks(4, run_experts) == [(6, False, 6), (6, False, 6), (3, False, 3), (0, False, 0)]


class Stage(nn.Module):
    def __init__(self, index):
        super().__init__()
        # The first of two stages has no matrix at all.
        self.layers = nn.ModuleDict({str(index): nn.Linear(4, 3) if index else nn.LayerNorm(4)})


def run_stages():
    stage = Stage(rank())
    optimizer = build_optimizer(nn.ModuleList([stage]), Optimizer(name="Muon"))
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.muon.exchanges


def test_stages_of_a_pipeline_take_the_same_number_of_exchanges(run_ranks):
    assert run_ranks(2, run_stages) == [[False], [False]]


def test_row_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"row_blocks = \[5\].*the 12 rows of q\.weight are no multiple"):
        build_optimizer(build(), Optimizer(name="Muon", groups=[{"pattern": "q.*", "row_blocks": [5]}]))


VARIANTS = {
    "float32": (torch.float32, {}),
    "lean": (torch.float32, {"exp_avg_dtype": "float8", "exp_avg_sq_dtype": "bfloat16", "stochastic_rounding": True}),
    "remainders": (torch.bfloat16, {"store_param_remainders": True, "exp_avg_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(kind, tmp_path):
    dtype, options = VARIANTS[kind]
    straight = started(dtype=dtype, **options)
    run_steps(*straight, range(5))
    first = started(dtype=dtype, **options)
    run_steps(*first, range(3))
    Checkpointer(tmp_path).save(3, *first)
    resumed = started(dtype=dtype, **options)
    Checkpointer(tmp_path).load(*resumed)
    run_steps(*resumed, range(3, 5))
    assert not differing(*resumed, whole_state(*straight))


def run_reshard(folder, layout, save):
    net, optimizer = started(layout)
    if save:
        run_steps(net, optimizer, range(2))
        Checkpointer(folder).save(2, net, optimizer)
        return 0.0
    Checkpointer(folder).load(net, optimizer)
    run_steps(net, optimizer, range(2, 4))
    single, other = started()
    run_steps(single, other, range(4))
    worst = 0.0
    for name, parameter in net.named_parameters():
        got, want = parameter.detach().to_local(), part_of(single.get_parameter(name).detach(), parameter)
        worst = max(worst, (got - want).abs().max().item() if got.numel() else 0.0)
    return worst


def test_momentum_moves_to_another_layout(run_ranks, tmp_path):
    run_ranks(4, run_reshard, str(tmp_path), "hsdp2x2", True)
    # Experts in five do not divide: shards of this layout are uneven.
    assert max(run_ranks(4, run_reshard, str(tmp_path), "fsdp4_edp2_etp2", False)) < 1e-10


def test_update_of_the_size_of_adamw():
    net, optimizer = started(dtype=torch.float32)
    before = net.o.weight.detach().clone()
    run_steps(net, optimizer, [0])
    update = (net.o.weight.detach() - before * (1 - 0.01 * 0.1)) / 0.01
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2) and math.isfinite(update.sum())
