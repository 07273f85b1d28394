"""Pipelines over every schedule against one process, in float64, on every rank."""

import pytest
import torch
from pipelines import Case, step_errors

from titan_moe.models import from_config

EXACT = 1e-10

MTP = {"mtp_depth": 2, "num_layers": 3}
CASES = {
    "gpipe": Case("GPipe", rows=2),
    "gpipe, one micro-batch": Case("GPipe", rows=2, microbatch=2),
    "1f1b": Case("1F1B", rows=5),
    "1f1b, four ranks, micro-batches of two": Case("1F1B", pp=4, rows=8, microbatch=2),
    "1f1b, embedding and head on their own": Case("1F1B", pp=4, layout="E|ttt|t|L", rows=5),
    "interleaved": Case("Interleaved1F1B", vpp=2),
    "interleaved, one stage per rank": Case("Interleaved1F1B", rows=2),
    "interleaved, fewer micro-batches than ranks": Case("Interleaved1F1B", pp=4, rows=3),
    "interleaved, uneven": Case("Interleaved1F1B", vpp=3, layout="Et|t*2|t|tt|t|L", override={"num_layers": 7}),
    "looped bfs": Case("LoopedBFS", vpp=2, rows=3),
    "zero bubble": Case("InterleavedZeroBubble", vpp=2, rows=6),
    "zero bubble, one stage per rank": Case("InterleavedZeroBubble", rows=3),
    "zbv": Case("ZBVZeroBubble", vpp=2, rows=5),
    "zbv, one micro-batch": Case("ZBVZeroBubble", vpp=2, rows=1),
    "zbv, four ranks": Case("ZBVZeroBubble", pp=4, vpp=2, override={"num_layers": 8}),
    "dualpipev": Case("DualPipeV", vpp=2, rows=5),
    "dualpipev, four ranks": Case("DualPipeV", pp=4, vpp=2, rows=9, override={"num_layers": 8}),
}


def check(results: list[dict[str, float]], case: Case) -> None:
    """Every gradient of the model is on some rank, and everything on every rank is exact."""
    with torch.device("meta"):
        names = {name for name, _ in from_config(case.config()).named_parameters()}
    assert {name.partition(":")[2] for errors in results for name in errors if ":" in name} == names
    for rank, errors in enumerate(results):
        assert max(errors.values()) < EXACT, (rank, {k: v for k, v in errors.items() if not v < EXACT})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_schedule_trains_evaluates_and_trains_as_one_process(run_ranks, case):
    check(run_ranks(case.pp, step_errors, case), case)


MTP_CASES = {
    "mtp before the head": Case("1F1B", layout="Ett|tmmL", override=MTP),
    "mtp and head apart": Case("1F1B", pp=4, layout="Ett|t|mm|L", override=MTP),
    "each depth apart": Case("1F1B", pp=4, layout="Ett|tm|m|L", override=MTP),
    "default": Case("Interleaved1F1B", vpp=3, override=MTP),
    "own embeddings and heads": Case("1F1B", pp=4, layout="Ett|tm|m|L", override=MTP | {"mtp_own_embeddings": True}),
    "tied head": Case("1F1B", layout="Ett|tL", override={"num_layers": 3, "tie_embeddings": True}),
    "tied head and mtp": Case("Interleaved1F1B", vpp=2, layout="Ett|tm|m|L", override=MTP | {"tie_embeddings": True}),
    "zero bubble": Case("InterleavedZeroBubble", vpp=2, layout="Ett|tm|m|L", override=MTP | {"tie_embeddings": True}),
    "embedding and tied head on one rank": Case("ZBVZeroBubble", vpp=2, override=MTP | {"tie_embeddings": True}),
    "dualpipev": Case("DualPipeV", vpp=2, layout="Ett|tm|m|L", rows=5, override=MTP),
}


@pytest.mark.parametrize("case", MTP_CASES.values(), ids=MTP_CASES.keys())
def test_mtp_and_shared_embeddings_are_exact(run_ranks, case):
    case.family = "deepseek_v3"
    check(run_ranks(case.pp, step_errors, case), case)


EXPERTS = {"aux_loss_coef": 0.02, "z_loss_coef": 0.001, "router_dtype": "float64"}
FOLDED = {
    "dp": Case(degrees={"data_parallel_shard_degree": 2}, rows=8),
    "hsdp": Case(degrees={"data_parallel_replicate_degree": 2}, rows=8),
    "dp, zero bubble": Case("InterleavedZeroBubble", vpp=2, degrees={"data_parallel_shard_degree": 2}, rows=8),
    "dp, zbv": Case("ZBVZeroBubble", vpp=2, degrees={"data_parallel_shard_degree": 2}, rows=8),
    "dp, dualpipev": Case("DualPipeV", vpp=2, degrees={"data_parallel_shard_degree": 2}, rows=8),
    "dp, interleaved": Case("Interleaved1F1B", vpp=2, degrees={"data_parallel_shard_degree": 2}, rows=8),
    "ep": Case(degrees={"expert_parallel_degree": 2}, rows=8),
    "tp": Case(degrees={"tensor_parallel_degree": 2}),
    "tp without sequence parallel": Case(degrees={"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "tp and ep, zbv": Case(
        "ZBVZeroBubble", vpp=2, degrees={"tensor_parallel_degree": 2, "expert_parallel_degree": 2}
    ),
    "cp": Case(degrees={"context_parallel_degree": 2}),
    "cp by heads, dualpipev": Case(
        "DualPipeV", vpp=2, degrees={"context_parallel_degree": 2, "context_parallel_method": "alltoall"}
    ),
}


@pytest.mark.parametrize("case", FOLDED.values(), ids=FOLDED.keys())
def test_pipelines_with_every_other_axis_are_exact(run_ranks, case):
    case.family, case.override = "deepseek_v3", {"mtp_depth": 1, "num_layers": 3, "tie_embeddings": True, **EXPERTS}
    check(run_ranks(4, step_errors, case), case)
