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


@pytest.mark.parametrize(
    "saved, loaded, experts",
    [({"ep": 2}, {"ep": 2}, 9), ({"ep": 2, "tp": 2}, {"dpr": 2, "ep": 2, "etp": 2}, 9), ({"ep": 4}, {"ep": 2}, 7)],
    ids=str,
)
def test_fault_28_experts_cut_unevenly_by_ep_and_by_fsdp(run_ranks, tmp_path, saved, loaded, experts):
    run_ranks(8, save, tmp_path, saved, experts)
    run_ranks(8, load, tmp_path, loaded, experts)
    run_ranks(8, load, tmp_path, saved, experts)
    run_ranks(1, one, tmp_path, experts)


def misplaced(folder):
    net = sharded({"ep": 2}, 9)
    w1 = net.layers["0"].experts.w1
    # As a layout would that cuts in an order we do not know: some rank's part has another size than its box.
    w1._local_tensor = w1._local_tensor.new_zeros(5, *w1._local_tensor.shape[1:])
    with pytest.raises(CheckpointError, match=r"experts.w1 of shape \[9, 8, 6\] over edp_shard 4 x ep 2"):
        Checkpointer(folder).save(1, net)
    assert Checkpointer(folder).latest() is None


def test_a_part_of_another_size_than_its_place_is_refused_by_name(run_ranks, tmp_path):
    run_ranks(8, misplaced, tmp_path)
