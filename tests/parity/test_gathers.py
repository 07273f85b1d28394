"""Which ranks see whose parameters: the groups in which a training step of the whole model gathers them."""

import pytest
import torch.distributed as dist
from collectives import recorded
from layout_run import Run
from layout_table import make
from model_case import Case, batch_of, local

from titan_moe.fsdp_ep import find_experts
from titan_moe.parallelize import build_meshes


def step_of(case: Case):
    """What one step issued, elements of each layer's experts here, and the ranks of the edp_shard and dense groups."""
    run = Run(case, build_meshes(case.parallelism()))
    experts = [sum(local(p).numel() for p in layer.parameters()) for layer in find_experts(run.modules)]
    with recorded() as issued:
        run.backward(batch_of(case, 0))
    groups = run.meshes.expert["edp_shard"], run.meshes.dense_fsdp["fsdp"]
    return issued, experts, *(tuple(dist.get_process_group_ranks(mesh.get_group())) for mesh in groups)


@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 4}, {"cp": 2, "ep": 2, "etp": 2}], ids=str)
def test_experts_are_gathered_only_inside_their_edp_shard_group(run_ranks, layout):
    # The hidden dim makes an expert larger than what else a group gathers.
    case = make(rows=8, hidden_dim=64, **layout)
    for issued, experts, edp_shard, dense in run_ranks(8, step_of, case):
        assert len(experts) == 4 and len(set(experts)) == 1 and len(edp_shard) == 2 and len(dense) in (4, 8)
        moved = [(kind, count) for kind, ranks, count in issued if ranks == edp_shard and kind != "reduce"]
        # Forward, backward, and the gradient, of three layers and the MTP layer.
        assert sorted(moved) == [("gather", experts[0])] * 8 + [("scatter", experts[0])] * 4
        elsewhere = {count for kind, ranks, count in issued if ranks == dense and kind == "gather"}
        assert elsewhere and max(elsewhere) < experts[0]
