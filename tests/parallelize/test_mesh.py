"""Both meshes of one world: who sits where, which groups exist, and their timeouts."""

import pytest
import torch
import torch.distributed as dist
from folded_net import layout
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_moe.distributed import all_groups, set_timeout, timeout_seconds
from titan_moe.errors import ConfigError

LAYOUTS = [
    {},
    {"tp": 2, "ep": 4},
    {"tp": 4, "ep": 8},
    {"pp": 2, "tp": 2, "ep": 2},
    {"pp": 2, "cp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"dpr": 2, "cp": 2, "ep": 2},
    {"pp": 2, "dpr": 2, "ep": 2, "etp": 2},
    {"pp": 8},
]


def places(degrees):
    """Coordinates of this rank by axis, and for every axis the ranks along it."""
    meshes = layout(**degrees)
    coordinates, lines = [], {}
    for mesh in (meshes.dense, meshes.expert):
        coordinates.append(dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True)))
        for name in mesh.mesh_dim_names:
            axis = mesh[name]
            assert dist.get_process_group_ranks(axis.get_group()) == axis.mesh.tolist()
            lines[name] = axis.mesh.tolist()
    lines["fsdp"] = meshes.dense_fsdp["fsdp"].mesh.tolist()
    return meshes.degrees, coordinates, lines, meshes.dense_fsdp.mesh_dim_names, meshes.expert_fsdp.mesh_dim_names


def groups_made(degrees):
    """Names of the groups that the meshes made, how many exist after using every axis, and whether pp is one."""
    before = set(all_groups())
    meshes = layout(**degrees)
    made = [group.group_desc for group in all_groups() if group not in before]
    for mesh in (meshes.dense, meshes.expert, meshes.dense_fsdp, meshes.expert_fsdp):
        for name in mesh.mesh_dim_names:
            mesh[name].get_group()
    return made, len(all_groups()), meshes.dense["pp"].get_group() is meshes.expert["pp"].get_group()


def timeouts(degrees):
    set_timeout(77)
    meshes = layout(**degrees)
    first = {timeout_seconds(group) for group in all_groups()}
    assert meshes.expert["ep"].get_group() in all_groups()
    set_timeout(55)
    return first, {timeout_seconds(group) for group in all_groups()}


def sums_along_axes(degrees):
    """An all-reduce of the rank's number along each axis."""
    meshes = layout(**degrees)
    sums = {}
    for mesh in (meshes.dense, meshes.expert):
        for name in mesh.mesh_dim_names:
            value = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(value, group=mesh[name].get_group())
            sums[name] = value.item()
    return sums


def users_own_dtensor(degrees):
    """Axis names work with DTensor: shard over ep, replicate over etp, and back."""
    meshes = layout(**degrees)
    whole = torch.arange(24.0).view(6, 4)
    mesh = meshes.expert["ep", "etp"]
    ep, _ = mesh.get_coordinate()
    placed = DTensor.from_local(whole.chunk(2)[ep], mesh, [Shard(0), Replicate()])
    return torch.equal(placed.full_tensor(), whole)


def wrong_world():
    with pytest.raises(ConfigError, match="NGPU = 16"):
        layout(dps=4, tp=4)


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_rank_sits_where_degrees_say(run_ranks, degrees):
    results = run_ranks(8, places, degrees)
    for rank, (resolved, coordinates, lines, dense_fsdp, expert_fsdp) in enumerate(results):
        assert coordinates == list(resolved.coordinates(rank))
        for view, axes in enumerate((resolved.dense, resolved.expert)):
            for name, size in axes.items():
                others = {k: v for k, v in coordinates[view].items() if k != name}
                along = [
                    other
                    for other in range(8)
                    if {k: v for k, v in resolved.coordinates(other)[view].items() if k != name} == others
                ]
                assert lines[name] == along and len(along) == size
        assert len(lines["fsdp"]) == resolved.dp_shard * resolved.cp
        assert dense_fsdp == (("dp_replicate", "fsdp") if resolved.dp_replicate > 1 else ("fsdp",))
        assert expert_fsdp == (("edp_replicate", "edp_shard") if resolved.edp_replicate > 1 else ("edp_shard",))


@pytest.mark.parametrize("degrees", LAYOUTS[1:6], ids=str)
def test_groups_are_made_once(run_ranks, degrees):
    for made, count, one_pp in run_ranks(8, groups_made, degrees):
        assert len(made) == len(set(made)) and count == len(made) + 1, made
        assert one_pp


@pytest.mark.parametrize("degrees", LAYOUTS[3:6], ids=str)
def test_fault_31_every_group_has_the_configured_timeout(run_ranks, degrees):
    assert run_ranks(8, timeouts, degrees) == [({77.0}, {55.0})] * 8


def test_collectives_stay_on_their_axis(run_ranks):
    for rank, sums in enumerate(run_ranks(8, sums_along_axes, {"pp": 2, "tp": 2, "ep": 2})):
        assert sums["pp"] == rank % 4 + rank % 4 + 4
        assert sums["tp"] == sums["ep"] == 2 * (rank // 2 * 2) + 1
        assert sums["edp_shard"] == sums["dp_shard"] == rank // 4 * 4 * 2 + (rank % 2) * 2 + 2
        assert sums["cp"] == sums["etp"] == sums["dp_replicate"] == rank


def test_axis_names_work_with_a_users_own_dtensors(run_ranks):
    assert run_ranks(8, users_own_dtensor, {"ep": 2, "etp": 2}) == [True] * 8


def test_degrees_that_do_not_fit_the_world_are_refused_before_any_group(run_ranks):
    run_ranks(2, wrong_world)
