"""The worker pool itself: values come back, and every way to fail is reported and survived."""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from titan_moe import distributed


def sum_of_ranks(scale):
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), value * scale


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise RuntimeError("boom in the middle")
    dist.barrier()


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(60)


def sharded_total():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    replicated = [Replicate(), Replicate()]
    return distribute_tensor(torch.arange(4.0), mesh, replicated).sum().full_tensor()


def meshes_alive():
    return sum(type(thing) is DeviceMesh for thing in gc.get_objects())


def mesh_timeouts():
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    distributed.set_timeout(77)
    before = [distributed.timeout_seconds(group) for group in distributed.all_groups()]
    distributed.set_timeout(33)
    return before, [distributed.timeout_seconds(group) for group in distributed.all_groups()]


def objects():
    me = dist.get_rank()
    return distributed.gather_objects(me * 10), distributed.broadcast_object(f"from {me}")


def test_results_come_back_in_rank_order_for_any_size(run_ranks):
    for ranks in (1, 2, 4, 3):
        results = run_ranks(ranks, sum_of_ranks, 2)
        assert [rank for rank, _ in results] == list(range(ranks))
        assert all(value == ranks * (ranks + 1) for _, value in results)


def test_meshes_of_different_shapes_follow_each_other(run_ranks):
    assert all(total == 6 for ranks in (4, 2, 4) for total in run_ranks(ranks, sharded_total))


def test_a_mesh_and_its_groups_do_not_outlive_their_run(run_ranks):
    run_ranks(4, sharded_total)
    assert run_ranks(4, meshes_alive) == [0, 0, 0, 0]


def test_an_exception_is_reported_with_its_traceback_and_the_next_run_works(run_ranks):
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, raise_on_rank_1)
    lines = str(failure.value).splitlines()
    assert lines[0] == "rank 1 raised:"
    assert "raise_on_rank_1" in str(failure.value) and "RuntimeError: boom in the middle" in lines
    assert [rank for rank, _ in run_ranks(2, sum_of_ranks, 1)] == [0, 1]


def test_a_dead_rank_is_reported_before_its_neighbours_errors(run_ranks):
    with pytest.raises(RankFailure) as failure:
        run_ranks(3, die_on_rank_1)
    assert str(failure.value).splitlines()[0] == "rank 1 died with exit code 3"
    assert len(run_ranks(3, sum_of_ranks, 1)) == 3


def test_a_rank_that_hangs_is_named_in_time(run_ranks):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"no answer within 2 s from ranks 0"):
        run_ranks(2, sleep_on_rank_0, timeout=2.0)
    assert time.monotonic() - start < 20
    assert len(run_ranks(2, sum_of_ranks, 1)) == 2


def test_fault_31_every_group_carries_the_configured_timeout(run_ranks):
    for before, after in run_ranks(4, mesh_timeouts):
        assert len(before) >= 3 and set(before) == {77.0}
        assert set(after) == {33.0}


def test_object_collectives(run_ranks):
    assert run_ranks(2, objects) == [([0, 10], "from 0")] * 2


def test_helpers_work_without_a_group():
    value = torch.tensor(3.0)
    assert distributed.all_reduce_sum(value) is value and value == 3
    assert distributed.gather_objects("a") == ["a"] and distributed.broadcast_object("b") == "b"
    distributed.set_timeout(1)
    distributed.destroy()


def test_in_backward_is_true_only_inside_a_backward_pass():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(distributed.in_backward()))
    seen.append(distributed.in_backward())
    y.sum().backward()
    assert seen == [False, True]
