"""The tracker of live storages, against tensors whose sizes are known."""

import pytest
import torch
from torch import nn

from titan_moe.observe.memory import TensorTracker, total_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_counts_what_is_alive_once_and_the_peak_where_it_was(device):
    before = torch.empty(1000, device=device)
    with TensorTracker() as tracker:
        a = torch.empty(10, device=device)
        b = a.view(2, 5)
        before.add_(1)
        c = torch.empty(100, dtype=torch.float64, device=device)
        del c
        d = before + 1
        del d
        e = torch.empty(30, dtype=torch.int8, device=device)
        assert [one.shape for one in tracker.alive()] == [(10,), (30,)]
    assert total_bytes(tracker.alive()) == 40 + 30
    assert [(one.shape, one.nbytes) for one in tracker.peak()] == [((10,), 40), ((1000,), 4000)]
    assert a is not None and b is not None and e is not None


def test_says_which_module_made_it_and_what_the_backward_pass_made():
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Sequential(nn.Tanh()))
    with TensorTracker() as tracker:
        x = torch.ones(2, 4)
        y = net(x)
        kept = [(one.module, one.shape) for one in tracker.alive()]
        y.sum().backward()
        made = [one for one in tracker.alive() if one.module == "backward"]
    # Tanh keeps its result, and the linear its input; what the linear made is gone.
    assert kept == [("outside", (2, 4)), ("1.0", (2, 8))]
    assert [one.shape for one in made] == [(8, 4)]
