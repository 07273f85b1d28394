"""Checkpoints of parameters on two meshes: right under another layout, or refused; never silently wrong."""

import pytest
import torch
from folded_net import Net, fill, fold, layout, part_of, shard

from titan_moe.checkpoint import Checkpointer
from titan_moe.errors import CheckpointError


def sharded(degrees, experts, dtype=torch.float64):
    meshes = layout(**degrees)
    return shard(fold(fill(Net(experts, dtype=dtype)), meshes), meshes)


def save(folder, degrees, experts):
    Checkpointer(folder).save(1, sharded(degrees, experts))


def load(folder, degrees, experts):
    net = sharded(degrees, experts)
    for parameter in net.parameters():
        parameter.data.to_local().fill_(torch.nan)
    Checkpointer(folder).load(net)
    for got, want in zip(net.parameters(), fill(Net(experts)).parameters(), strict=True):
        assert torch.equal(got.to_local(), part_of(want, got))


def refused(folder, degrees, experts):
    net = sharded(degrees, experts)
    with pytest.raises(
        CheckpointError, match=r"experts.w1 of shape \[9, 8, 6\] is cut unevenly over edp_shard 4 x ep 2"
    ):
        Checkpointer(folder).save(1, net)
    assert Checkpointer(folder).latest() is None


def load_refused(folder, degrees, experts):
    with pytest.raises(CheckpointError, match=r"experts\.w1"):
        Checkpointer(folder).load(sharded(degrees, experts))


def one(folder, experts):
    net = Net(experts)
    Checkpointer(folder).load(net)
    for got, want in zip(net.parameters(), fill(Net(experts)).parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "saved, loaded, experts",
    [
        ({"ep": 4, "tp": 2}, {"ep": 2, "etp": 2, "tp": 4}, 8),
        ({"dpr": 2, "ep": 2, "tp": 2}, {"ep": 8}, 8),
        # Uneven, but cut by one axis only where it matters.
        ({"ep": 8}, {"dpr": 2, "ep": 4}, 15),
    ],
    ids=str,
)
def test_experts_saved_under_one_layout_load_under_another(run_ranks, tmp_path, saved, loaded, experts):
    run_ranks(8, save, tmp_path, saved, experts)
    run_ranks(8, load, tmp_path, loaded, experts)
    run_ranks(1, one, tmp_path, experts)


def test_fault_28_experts_cut_unevenly_twice_are_refused_by_name(run_ranks, tmp_path):
    run_ranks(8, refused, tmp_path, {"ep": 2}, 9)


def test_experts_cut_unevenly_twice_are_not_loaded_from_a_good_checkpoint(run_ranks, tmp_path):
    run_ranks(2, save, tmp_path, {"ep": 2}, 9)
    run_ranks(8, load_refused, tmp_path, {"ep": 2}, 9)
