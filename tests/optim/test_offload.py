"""State on the host between steps: where it is, in which order it moves, and that no bit of a run changes."""

import weakref

import pytest
import torch
from sharded import build, differing, run_steps, whole_state
from torch import nn

from titan_moe.checkpoint import Checkpointer
from titan_moe.config.job import Optimizer
from titan_moe.optim import build_optimizer
from titan_moe.optim.offload import HostMemory

KINDS = {
    "adamw": (torch.float32, {}),
    "fp8": (torch.float32, {"exp_avg_dtype": "float8", "exp_avg_sq_dtype": "float8", "stochastic_rounding": True}),
    "remainders": (torch.bfloat16, {"store_param_remainders": True, "exp_avg_dtype": "bfloat16"}),
    "master": (torch.bfloat16, {"master_dtype": "float32"}),
    "muon": (torch.float32, {"name": "Muon"}),
}


def started(kind, layout=None, **options):
    dtype, own = KINDS[kind]
    net = build(layout, dtype=dtype)
    optimizer = build_optimizer(net, Optimizer(lr=0.01, **own, **options))
    # The whole state would fit the smallest bucket that can be configured.
    optimizer.offload.bucket_bytes = 600
    return net, optimizer


@pytest.mark.parametrize("options", [{"offload_fraction": 1.0}, {"offload_fraction": 0.5}, {"cpu_step_fraction": 0.6}])
@pytest.mark.parametrize("kind", KINDS)
def test_offloading_changes_no_bit(kind, options):
    plain, moved = started(kind), started(kind, **options)
    for pair in (plain, moved):
        run_steps(*pair, range(4))
    assert moved[1].state_bytes()[1] > 0
    assert not differing(*moved, whole_state(*plain))


@pytest.mark.parametrize("kind", KINDS)
def test_between_steps_no_state_is_on_the_device(kind):
    _, plain = pair = started(kind)
    run_steps(*pair, range(2))
    total, none = plain.state_bytes()
    _, moved = pair = started(kind, offload_fraction=1.0)
    run_steps(*pair, range(2))
    assert none == 0 and total > 0 and moved.state_bytes() == (0, total)


def test_a_fraction_leaves_and_the_rest_stays():
    net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])
    optimizer = build_optimizer(net, Optimizer(offload_fraction=0.45))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # A parameter is never split: five of ten.
    assert optimizer.state_bytes() == (5 * 8 * 64, 5 * 8 * 64)


class Recorded(HostMemory):
    """What moved when, and how much of it was alive on the device."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.events, self.alive, self.peak = [], [], 0

    def bring(self, tensors):
        copies, event = super().bring(tensors)
        if tensors:
            self.events.append(("in", sum(t.nbytes for t in tensors)))
        self.alive += [(weakref.ref(copy), copy.nbytes) for copy in copies]
        self.peak = max(self.peak, sum(size for copy, size in self.alive if copy() is not None))
        return copies, event

    def take(self, pairs):
        super().take(pairs)
        if pairs:
            self.events.append(("out", sum(source.nbytes for source, _ in pairs)))


@pytest.mark.parametrize("depth", [4, 16, 64])
def test_two_buckets_at_most_are_on_the_device_whatever_the_depth(depth):
    net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(depth)])
    optimizer = build_optimizer(net, Optimizer(offload_fraction=1.0))
    optimizer.offload.host, optimizer.offload.bucket_bytes = Recorded(), 2 * 512
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        host = optimizer.offload.host
        buckets = depth // 2
        # The next bucket is on its way before one is updated and leaves.
        order = ["in"] + ["in", "out"] * (buckets - 1) + ["out"]
        assert [kind for kind, _ in host.events] == order
        for way in ("in", "out"):
            assert [size for kind, size in host.events if kind == way] == [1024] * buckets
        assert host.peak == 2 * 1024
        host.events.clear()


def test_the_step_on_the_cpu_moves_gradients_and_parameters_but_no_state():
    net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    optimizer = build_optimizer(net, Optimizer(cpu_step_fraction=0.5))
    optimizer.offload.host = Recorded()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.offload.host.events == [] and optimizer.state_bytes() == (1024, 1024)
    stepped = [state["exp_avg"] for state in optimizer.state.values()]
    assert [optimizer.offload.host.owns(moment) for moment in stepped] == [True, True, False, False]


@pytest.mark.parametrize(("first", "then"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_with_and_without_offload(kind, first, then, tmp_path):
    straight = started(kind)
    run_steps(*straight, range(5))
    begun = started(kind, offload_fraction=first)
    run_steps(*begun, range(3))
    Checkpointer(tmp_path).save(3, *begun)
    resumed = started(kind, offload_fraction=then)
    Checkpointer(tmp_path).load(*resumed)
    run_steps(*resumed, range(3, 5))
    assert not differing(*resumed, whole_state(*straight))
    assert resumed[1].state_bytes()[0 if then else 1] == 0


def run_sharded(kind, layout, folder):
    plain, moved = started(kind, layout), started(kind, layout, offload_fraction=1.0)
    for pair in (plain, moved):
        run_steps(*pair, range(3))
    here, away = moved[1].state_bytes()
    Checkpointer(folder).save(3, *moved)
    resumed = started(kind, layout, offload_fraction=1.0)
    Checkpointer(folder).load(*resumed)
    loaded = resumed[1].state_bytes()
    for pair in (plain, resumed):
        run_steps(*pair, range(3, 5))
    local = {
        name: value.to_local() if hasattr(value, "to_local") else value for name, value in whole_state(*plain).items()
    }
    own = {
        name: value.to_local() if hasattr(value, "to_local") else value for name, value in whole_state(*resumed).items()
    }
    wrong = [name for name in local if not torch.equal(local[name], own[name])]
    return here, away > 0, loaded == (0, away), wrong


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_sharded_state_leaves_returns_and_resumes(run_ranks, kind, tmp_path):
    results = run_ranks(4, run_sharded, kind, "fsdp2_tp2_ep4", str(tmp_path))
    assert results == [(0, True, True, [])] * 4
