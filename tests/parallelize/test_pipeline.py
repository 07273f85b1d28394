"""Pipelines over every schedule against one process, in float64, on every rank."""

import pytest
import torch
from pipelines import (
    Case,
    batch_of,
    build,
    gradient_errors,
    local,
    one_process_step,
    own_part,
    step_errors,
    total_over_ranks,
    weight_of,
)

from titan_moe.errors import TrainingError
from titan_moe.models import from_config, init_parameters
from titan_moe.optim import clip_grad_norm
from titan_moe.parallelize import build_meshes, parallelize
from titan_moe.parallelize.pipeline import Pipeline, forward_ticks
from titan_moe.parallelize.split import split_model
from titan_moe.plugins.recompute import recompute_layers

pytestmark = pytest.mark.slow

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
    "tp, sequences that do not divide": Case("DualPipeV", vpp=2, degrees={"tensor_parallel_degree": 2}, seq_len=11),
    "tp without sequence parallel": Case(degrees={"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "tp and ep, zbv": Case("ZBVZeroBubble", vpp=2, degrees={"tensor_parallel_degree": 2, "expert_parallel_degree": 2}),
    "cp": Case(degrees={"context_parallel_degree": 2}),
    "cp by heads, dualpipev": Case(
        "DualPipeV", vpp=2, degrees={"context_parallel_degree": 2, "context_parallel_method": "alltoall"}
    ),
}


OWN = {"mtp_own_embeddings": True, "tie_embeddings": False}
FOLDED |= {
    "dp, own mtp embeddings": Case(degrees={"data_parallel_shard_degree": 2}, rows=8, override=OWN),
    "tp, own mtp embeddings, zbv": Case("ZBVZeroBubble", vpp=2, degrees={"tensor_parallel_degree": 2}, override=OWN),
}


@pytest.mark.parametrize("case", FOLDED.values(), ids=FOLDED.keys())
def test_pipelines_with_every_other_axis_are_exact(run_ranks, case):
    shape = {"mtp_depth": 1, "num_layers": 3, "tie_embeddings": True, **EXPERTS}
    case.family, case.override = "deepseek_v3", shape | case.override
    check(run_ranks(4, step_errors, case), case)


RECOMPUTED = {
    "1f1b": Case("1F1B"),
    "zero bubble": Case("InterleavedZeroBubble", vpp=2),
    "dualpipev and fsdp": Case("DualPipeV", vpp=2, degrees={"data_parallel_shard_degree": 1}),
}


@pytest.mark.parametrize("case", RECOMPUTED.values(), ids=RECOMPUTED.keys())
def test_recompute_and_the_global_auxiliary_loss_are_exact(run_ranks, case):
    case.family, case.override = "deepseek_v3", {"mtp_depth": 1, "num_layers": 3, "global_aux_loss_coef": 0.05}
    check(run_ranks(case.pp, step_errors, case, recompute_layers), case)


def accumulated_errors(case: Case) -> dict[str, float]:
    reference, pipeline = build(case)
    batches = [batch_of(case, seed) for seed in range(3)]
    weight = weight_of({"labels": torch.cat([batch["labels"] for batch in batches])})
    for batch in batches:
        one_process_step(reference, batch, case, 1, weight)
        pipeline.train_step(own_part(batch, pipeline), weight, last=batch is batches[-1])
    return gradient_errors(reference, pipeline)


@pytest.mark.parametrize("degrees", [{}, {"data_parallel_shard_degree": 1}], ids=["plain", "fsdp"])
def test_fault_5_accumulation_under_a_pipeline_rescales_nothing(run_ranks, degrees):
    case = Case(override={"tie_embeddings": True}, degrees=degrees)
    check(run_ranks(2, accumulated_errors, case), case)


def trained_copies(case: Case) -> list[torch.Tensor]:
    """This rank's copies of the embedding after three optimizer steps, and its start."""
    _, pipeline = build(case)
    optimizer = torch.optim.AdamW([p for module in pipeline.modules for p in module.parameters()], lr=0.1)
    start = [local(module.embed_tokens.weight).detach().clone() for module in pipeline.modules if module.embed_tokens]
    for seed in range(3):
        batch = batch_of(case, seed)
        pipeline.train_step(own_part(batch, pipeline), weight_of(batch))
        clip_grad_norm(list(pipeline.replicated_over_pp), 0.1, pp=case.pp, copies=pipeline.replicated_over_pp)
        optimizer.step()
        optimizer.zero_grad()
    copies = [local(module.embed_tokens.weight).detach() for module in pipeline.modules if module.embed_tokens]
    assert not any(torch.equal(before, after) for before, after in zip(start, copies, strict=True))
    return copies


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_copies_of_a_shared_embedding_stay_bitwise_equal(run_ranks, schedule):
    override = {"num_layers": 2, "mtp_depth": 1, "tie_embeddings": True}
    case = Case(schedule, vpp=2, layout="E|tt|m|L", family="deepseek_v3", override=override)
    copies = [copy for rank in run_ranks(2, trained_copies, case) for copy in rank]
    assert len(copies) == 3 and all(torch.equal(copy, copies[0]) for copy in copies)


def refused_shape() -> None:
    case = Case()
    _, pipeline = build(case)
    batch = batch_of(case)
    pipeline.train_step(batch, weight_of(batch))
    for other in ({k: v[:, :-1] for k, v in batch.items()}, {k: v[:-1] for k, v in batch.items()}):
        with pytest.raises(TrainingError, match=r"the first was \[4, 12\], this one is \[(4, 11|3, 12)\]\. Pad it"):
            pipeline.train_step(other, weight_of(batch))
    pipeline.train_step(batch, weight_of(batch))


def test_a_batch_of_another_shape_is_refused(run_ranks):
    run_ranks(2, refused_shape)


def dense_stage() -> tuple[list[str], int]:
    case = Case(layout="Et|ttL", family="deepseek_v3", override={"num_layers": 3})
    _, pipeline = build(case)
    batch = batch_of(case)
    pipeline.train_step(batch, weight_of(batch))
    report = pipeline.finish_step()
    return report["names"], report["counts_LE"].sum().item()


def test_fault_31_a_rank_without_moe_layers_reports_those_of_the_others(run_ranks):
    slots = 4 * 12 * 2 * 2
    assert run_ranks(2, dense_stage) == [(["layers.1.mlp", "layers.2.mlp"], slots)] * 2


def low_precision_loss(compute: torch.dtype | None) -> tuple[float, set[torch.dtype]]:
    """The loss, and the dtypes of gradients, with fp32 parameters."""
    case = Case("DualPipeV", vpp=2, degrees={"data_parallel_shard_degree": 1})
    config, parallelism = case.config(), case.parallelism()
    meshes = build_meshes(parallelism)
    modules = split_model(config, parallelism, meshes.dense.get_local_rank("pp"))
    for module in modules.values():
        parallelize(module, meshes, compute_dtype=compute, reshard_after_forward=False)
        module.to_empty(device="cpu")
        init_parameters(module, 7)
    dtype = compute or torch.float32
    pipeline = Pipeline(modules, parallelism, meshes, device=torch.device("cpu"), dtype=dtype)
    batch = batch_of(case)
    loss = total_over_ranks(pipeline.train_step(batch, weight_of(batch)), pipeline)[0].item()
    return loss, {p.grad.dtype for module in pipeline.modules for p in module.parameters()}


def test_mixed_precision_sends_hidden_states_in_the_compute_dtype(run_ranks):
    (loss, dtypes), _ = run_ranks(2, low_precision_loss, torch.bfloat16)
    (exact, _), _ = run_ranks(2, low_precision_loss, None)
    # bfloat16 has 8 bits.
    assert dtypes == {torch.float32} and loss != exact and abs(loss / exact - 1) < 0.01


@pytest.mark.parametrize("rank_of", [[0, 1], [0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 3, 3, 2, 1, 0], [0]])
def test_forward_ticks_run_every_stage_once_after_its_input_and_one_per_rank(rank_of):
    done = set()
    ticks = forward_ticks(rank_of, 5)
    for tick in ticks:
        ranks = [rank_of[stage] for stage, _ in tick]
        assert len(set(ranks)) == len(ranks)
        assert all(stage == 0 or (stage - 1, micro) in done for stage, micro in tick)
        done |= set(tick)
    assert len(done) == sum(map(len, ticks)) == 5 * len(rank_of)
    # Nobody waits longer than it takes to fill the pipeline.
    ranks = max(rank_of) + 1
    assert len(ticks) <= 5 * len(rank_of) // ranks + len(rank_of)
