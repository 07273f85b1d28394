"""One world of processes seen as two meshes (report section 3.3, parallel folding)."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_moe.config.degrees import Degrees, resolve_degrees
from titan_moe.config.job import Parallelism
from titan_moe.distributed import set_timeout, timeout_seconds, world_size


@dataclass(frozen=True)
class Meshes:
    """Two views of one world; the last axis of each varies fastest over the ranks.

    ``dense`` has the axes (pp, dp_replicate, dp_shard, cp, tp), ``expert`` (pp, edp_replicate, edp_shard, ep, etp).
    One axis is had by name, ``meshes.dense["tp"]``, and is a mesh of its own with its process group.
    """

    degrees: Degrees
    world: DeviceMesh
    dense: DeviceMesh
    expert: DeviceMesh
    dense_fsdp: DeviceMesh
    """What dense parameters are sharded over, dp_shard x cp as one axis ``fsdp``; with dp_replicate before it."""
    expert_fsdp: DeviceMesh
    """What expert parameters are sharded over, ``edp_shard``; with edp_replicate before it."""
    dispatch: DeviceMesh
    """Ranks among which tokens travel to experts: ep x etp as one axis, etp fastest."""
    sequence: DeviceMesh
    """Ranks that share each micro-batch: cp x tp as one axis."""
    stage: DeviceMesh
    """All ranks of a pipeline stage as one axis."""


def build_meshes(config: Parallelism, device_type: str = "cpu") -> Meshes:
    """Make the meshes of the initialised world; each group once, all with the world's timeout.

    Args:
        config: the degrees; see :func:`~titan_moe.config.degrees.resolve_degrees`.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: the degrees do not fit the world. Check them before the process group exists with
            ``resolve_degrees``.
    """
    d = resolve_degrees(config, world_size())
    stage = d.world // d.pp
    world = init_device_mesh(device_type, (d.world,), mesh_dim_names=("world",))
    # Both views unflatten one mesh, so pp is one group. fsdp is an axis of its own: a flattened name has no slices.
    base = world._unflatten(0, (d.pp, stage), ("pp", "stage"))
    storage = base._unflatten("stage", (d.dp_replicate, d.dp_shard * d.cp, d.tp), ("dp_replicate", "fsdp", "tp"))
    dense = storage._unflatten("fsdp", (d.dp_shard, d.cp), ("dp_shard", "cp"))
    copies = base._unflatten(
        "stage", (d.edp_replicate, d.edp_shard, d.ep * d.etp), ("edp_replicate", "edp_shard", "dispatch")
    )
    expert = copies._unflatten("dispatch", (d.ep, d.etp), ("ep", "etp"))
    shares = base._unflatten("stage", (d.dp_replicate * d.dp_shard, d.cp * d.tp), ("batch", "sequence"))
    meshes = Meshes(
        degrees=d,
        world=world,
        dense=dense,
        expert=expert,
        dense_fsdp=storage["dp_replicate", "fsdp"] if d.dp_replicate > 1 else storage["fsdp"],
        expert_fsdp=expert["edp_replicate", "edp_shard"] if d.edp_replicate > 1 else expert["edp_shard"],
        dispatch=copies["dispatch"],
        sequence=shares["sequence"],
        stage=base["stage"],
    )
    # Groups that meshes make fall back to torch's defaults of 10 or 30 minutes.
    set_timeout(timeout_seconds())
    return meshes
