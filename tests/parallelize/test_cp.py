"""Context parallelism against one process, in float64: loss and gradients of every family, on every rank."""

from math import prod

import layouts
import pytest
import torch
import torch.distributed as dist

from titan_moe import models
from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError
from titan_moe.models.attention import attend, attention_mask
from titan_moe.models.loss import IGNORE, token_losses
from titan_moe.models.rope import Rotary
from titan_moe.moe.balance import set_token_weight
from titan_moe.parallelize import build_meshes, context, parallelize
from titan_moe.parallelize.context import ContextParallel, check_context, local_positions, shard_sequence
from titan_moe.plugins.recompute import recompute_layers

pytestmark = pytest.mark.slow

TINY = {"dim": 32, "num_layers": 2, "hidden_dim": 16, "vocab_size": 40, "init_std": 0.3, "z_loss_coef": 0.01}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GQA = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 8}
LATENT = {
    "num_heads": 4,
    "ffn_dim": 48,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
FAMILIES = {
    "qwen3_moe": GQA,
    "mixtral": {**GQA, "sliding_window": 7},
    "gpt_oss": {**GQA, "sliding_window": 5, "rope_scaling": YARN},
    "glm4_moe": {**GQA, "ffn_dim": 48},
    "deepseek_v3": {**LATENT, "rope_scaling": YARN, "mtp_depth": 2},
    "kimi_k2": {**LATENT, "q_lora_rank": None},
}


def build(family, **override):
    model = models.build(family, "debug", **{**TINY, **FAMILIES[family], **override}).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                # Biases, norms and sinks start equal for all heads: that would hide a mix-up.
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def whole_batch(documents, rows=4, seq_len=32):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (rows, seq_len), generator=generator)
    labels = torch.randint(40, (rows, seq_len), generator=generator)
    for row in range(rows):
        labels[row, : 3 * row] = IGNORE
    batch = {"input_ids": ids, "labels": labels, "valid": labels != IGNORE}
    if documents:
        # Borders inside chunks and on their edges, other ones in each row.
        starts = torch.rand(rows, seq_len, generator=generator) < 0.15
        starts[0, seq_len // 4] = True
        batch["document_ids"] = starts.cumsum(1)
    return batch


def step(model, batch, weight):
    set_token_weight(model, weight)
    outputs = model(
        batch["input_ids"],
        batch.get("document_ids"),
        batch["valid"],
        batch.get("positions"),
        batch.get("mtp_input_ids"),
    )
    losses = token_losses(outputs, batch["labels"], batch.get("document_ids"), 0.3, batch.get("mtp_labels"))
    loss = losses.total * weight
    loss.backward()
    return loss.detach()


def errors_against_one_process(family, method, dp, cp, documents, seq_len, override):
    meshes = build_meshes(Parallelism(data_parallel_shard_degree=dp, context_parallel_degree=cp))
    batch = whole_batch(documents, seq_len=seq_len)
    weight = 1 / batch["valid"].sum().double()
    oracle, model = build(family, **override), build(family, **override)
    want_loss = step(oracle, batch, weight)

    axis = meshes.dense["cp"]
    methods = ["allgather", "alltoall"] if method == "mixed" else [method]
    attentions = [module for module in model.modules() if hasattr(module, "context_parallel")]
    for i, module in enumerate(attentions):
        module.context_parallel = ContextParallel(axis.get_group(), methods[i % len(methods)])
    dp_rank = meshes.dense["dp_shard"].get_local_rank()
    part = {name: tensor[dp_rank::dp] for name, tensor in batch.items()}
    part = shard_sequence(part, axis.get_local_rank(), cp, mtp_depth=model.config.mtp_depth)
    loss = step(model, part, weight)
    dist.all_reduce(loss)
    errors = {"loss": ((loss - want_loss) / want_loss).abs().item()}
    for (name, got), want in zip(model.named_parameters(), oracle.parameters(), strict=True):
        grad = torch.zeros_like(got) if got.grad is None else got.grad
        dist.all_reduce(grad)
        errors[name] = ((grad - want.grad).abs().max() / want.grad.abs().max()).item()
    return errors


def check(run_ranks, family, method, dp, cp, documents=True, seq_len=32, **override):
    arguments = (family, method, dp, cp, documents, seq_len, override)
    for errors in run_ranks(dp * cp, errors_against_one_process, *arguments):
        # NaN, as of a gradient that is 0 everywhere, fails as well.
        worst = max(errors.items(), key=lambda item: item[1])
        assert all(error < 1e-10 for error in errors.values()), (worst, errors)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_share_a_sequence_like_one(run_ranks, family, method, documents):
    check(run_ranks, family, method, 1, 2, documents)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_four_ranks_share_a_sequence_like_one(run_ranks, family, method):
    check(run_ranks, family, method, 1, 4)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_context_parallel_beside_data_parallel(run_ranks, method):
    check(run_ranks, "qwen3_moe", method, 2, 2)


def test_chunks_long_enough_to_be_cut_into_pieces(run_ranks):
    check(run_ranks, "mixtral", "allgather", 1, 2, True, seq_len=512)


def test_each_layer_may_have_a_method_of_its_own(run_ranks):
    check(run_ranks, "qwen3_moe", "mixed", 1, 2)


def test_fault_12_mtp_under_cp2_has_the_gradients_of_cp1(run_ranks):
    for method in ("allgather", "alltoall"):
        check(run_ranks, "deepseek_v3", method, 1, 2, mtp_depth=3, mtp_own_embeddings=True)


def parallelized(family, degrees, method, seq_len, override, recompute=False):
    """Errors of this rank's gradient slices through ``parallelize``, sharded storage included."""
    meshes = build_meshes(Parallelism(**degrees))
    batch = whole_batch(True, seq_len=seq_len)
    weight = 1 / (batch["labels"] != IGNORE).sum().double()
    dp, cp = meshes.degrees.dp_shard, meshes.degrees.cp
    oracle = layouts.build_tiny(family, vocab_size=40, **override)
    # The aux loss of a micro-batch is not linear in its tokens: the oracle takes the ranks' micro-batches in turn.
    want = sum(step(oracle, {name: x[r::dp] for name, x in batch.items()}, weight) for r in range(dp))
    model = layouts.build_tiny(family, vocab_size=40, **override)
    if recompute:
        assert recompute_layers(model) > 1
    model = parallelize(model, meshes, cp_method=method)
    rank = meshes.dense["dp_shard"].get_local_rank()
    part = {name: x[rank::dp] for name, x in batch.items()}
    part = shard_sequence(part, meshes.dense["cp"].get_local_rank(), cp, mtp_depth=model.config.mtp_depth)
    loss = step(model, part, weight)
    dist.all_reduce(loss)
    errors = layouts.gradient_errors(model, {name: p.grad for name, p in oracle.named_parameters()})
    return {"loss": ((loss / meshes.degrees.tp - want) / want).abs().item(), **errors}


CP2 = {"context_parallel_degree": 2}
LAYOUTS = {
    "cp2": CP2,
    "dp2 cp2": {**CP2, "data_parallel_shard_degree": 2},
    "cp2 tp2": {**CP2, "tensor_parallel_degree": 2},
    "cp2 tp2 ep4": {**CP2, "tensor_parallel_degree": 2, "expert_parallel_degree": 4},
}
BALANCED = {"aux_loss_coef": 0.1, "seq_aux_loss_coef": 0.2, "z_loss_coef": 0.01}


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_06_router_gradients_with_aux_and_z_losses_under_cp_and_tp(run_ranks, layout, method):
    degrees = LAYOUTS[layout]
    ranks = prod(value for name, value in degrees.items() if name != "expert_parallel_degree")
    for family in ("qwen3_moe", "deepseek_v3"):
        for errors in run_ranks(ranks, parallelized, family, degrees, method, 16, BALANCED):
            worst = max(errors.items(), key=lambda item: item[1])
            assert len(errors) > 15 and all(error < 1e-10 for error in errors.values()), (family, worst)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_recomputed_layers_share_the_sequence_again(run_ranks, method):
    for errors in run_ranks(2, parallelized, "deepseek_v3", CP2, method, 16, BALANCED, True):
        assert max(errors.values()) < 1e-10, max(errors.items(), key=lambda item: item[1])


def gathered_shapes():
    """Shapes that latent attention sends to all ranks, one layer after the other."""
    meshes = build_meshes(Parallelism(context_parallel_degree=2))
    model = parallelize(build("deepseek_v3", mtp_depth=0), meshes, fsdp=False).eval()
    part = shard_sequence(whole_batch(False), meshes.dense["cp"].get_local_rank(), 2)
    shapes, inner = [], context.all_gather

    def spy(x, *args):
        shapes.append(tuple(x.shape))
        return inner(x, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "all_gather", spy)
        model(part["input_ids"], positions=part["positions"])
    return shapes


def test_latent_attention_gathers_latents_not_heads(run_ranks):
    # 4 sequences, 16 tokens of each, 12 latent and 4 rotary dims; the heads have 4 x (12 + 10).
    assert run_ranks(2, gathered_shapes) == [[(4, 16, 16)] * 2] * 2


@pytest.mark.parametrize("G", [1, 4])
def test_a_run_of_queries_sees_the_keys_up_to_its_end_without_a_mask(G):
    # What CUDA does; there no mask is made.
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 24, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 24, G, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    want = attend(q, k, v, None, 0.3)
    for rank in range(3):
        positions = local_positions(24, rank, 3)
        got = attend(q[:, positions], k, v, None, 0.3, runs=[(rank * 4, 4), ((5 - rank) * 4, 4)])
        torch.testing.assert_close(got, want[:, positions], rtol=0, atol=1e-14)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_masks_and_tables_of_local_positions_are_rows_of_the_whole_ones(documents, window):
    seq_len, cp = 24, 3
    kind = {"device": torch.device("cpu"), "dtype": torch.float64}
    ids = (torch.arange(seq_len) * 5 // seq_len).expand(2, seq_len) if documents else None
    whole = torch.full((1, 1, seq_len, seq_len + 1), float("-inf"), dtype=torch.float64)
    whole = whole.repeat(2 if documents else 1, 1, 1, 1)
    whole[..., 0] = 0
    for query in range(seq_len):
        for key in range(max(0, query - (window or seq_len) + 1), query + 1):
            if ids is None or ids[0, query] == ids[0, key]:
                whole[..., query, key + 1] = 0
    rotary = Rotary(8, 1e4, YARN, head_dim=12, interleaved=True)
    tables = rotary.tables(torch.arange(seq_len), dtype=torch.float64)
    seen = []
    for rank in range(cp):
        positions = local_positions(seq_len, rank, cp)
        seen.append(positions)
        mask = attention_mask(seq_len, ids, window, True, queries_Q=positions, **kind)
        assert torch.equal(mask, whole[:, :, positions])
        for got, want in zip(rotary.tables(positions, dtype=torch.float64), tables, strict=True):
            assert torch.equal(got, want[positions])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(seq_len))


def test_shards_hold_the_first_and_last_chunk_and_the_tokens_ahead():
    ids = torch.arange(100, 108)[None]
    batch = {
        "input_ids": ids,
        "labels": ids + 1,
        "document_ids": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]),
        "valid": ids < 107,
    }
    first, second = (shard_sequence(batch, rank, 2, mtp_depth=2) for rank in range(2))
    assert first["positions"].tolist() == [0, 1, 6, 7] and second["positions"].tolist() == [2, 3, 4, 5]
    assert second["input_ids"].tolist() == [[102, 103, 104, 105]]
    assert first["valid"].tolist() == [[True, True, True, False]]
    assert first["document_ids"] is batch["document_ids"]
    assert first["mtp_input_ids"].tolist() == [[[101, 102, ~107, -1], [102, 103, -1, -1]]]
    assert second["mtp_labels"].tolist() == [[[104, 105, -100, 107], [105, -100, -100, 108]]]
    assert shard_sequence(batch, 0, 1, mtp_depth=2) is batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 100, "cp": 4}, r"seq_len = 100 .* = 8.* 96 or 104"),
        ({"seq_len": 3, "cp": 2}, r"Nearest legal: 4\."),
        ({"seq_len": 64, "cp": 4, "method": "ring"}, "'ring'.* allgather, alltoall"),
        (
            {"seq_len": 64, "cp": 4, "method": "alltoall", "num_heads": 12, "tp": 2},
            "4 x tensor.*.*: 2 or 3; 'allgather'",
        ),
    ],
)
def test_layouts_that_do_not_divide_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_context(**arguments)


def test_what_divides_passes():
    check_context(97, 1)
    check_context(96, 4, method="alltoall", num_heads=8, tp=2)
    check_context(96, 4, num_heads=7)


def test_positions_without_context_parallelism_are_refused():
    with pytest.raises(ConfigError, match="shard_sequence"):
        build("qwen3_moe")(torch.zeros(1, 8, dtype=torch.int64), positions=torch.arange(8))


def refusals():
    model = parallelize(build("qwen3_moe"), build_meshes(Parallelism(context_parallel_degree=2)), fsdp=False)
    part = shard_sequence(whole_batch(True), dist.get_rank(), 2)
    ids, positions = part["input_ids"], part["positions"]
    texts = []
    for documents, places in ((part["document_ids"], None), (part["document_ids"][:, positions], positions)):
        with pytest.raises(ConfigError) as caught:
            model(ids, documents, positions=places)
        texts.append(str(caught.value))
    return texts


def test_parts_that_shard_sequence_did_not_make_are_refused(run_ranks):
    for first, second in run_ranks(2, refusals):
        assert "shard_sequence" in first
        assert "document_ids of 16 positions" in second and "all 32" in second
