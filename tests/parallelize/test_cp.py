"""Context parallelism against one process, in float64: loss and gradients of every family, on every rank."""

import pytest
import torch
import torch.distributed as dist

from titan_moe import models
from titan_moe.config.job import Parallelism
from titan_moe.models.loss import IGNORE, token_losses
from titan_moe.moe.balance import set_token_weight
from titan_moe.parallelize.context import ContextParallel, shard_sequence
from titan_moe.parallelize.mesh import build_meshes

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


def errors_against_one_process(family, method, dp, cp, documents, override):
    meshes = build_meshes(Parallelism(data_parallel_shard_degree=dp, context_parallel_degree=cp))
    batch = whole_batch(documents)
    weight = 1 / batch["valid"].sum().double()
    oracle, model = build(family, **override), build(family, **override)
    want_loss = step(oracle, batch, weight)

    axis = meshes.dense["cp"]
    for module in model.modules():
        if hasattr(module, "context_parallel"):
            module.context_parallel = ContextParallel(axis.get_group(), method)
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


def check(run_ranks, family, method, dp, cp, documents=True, **override):
    for errors in run_ranks(dp * cp, errors_against_one_process, family, method, dp, cp, documents, override):
        # NaN, as of a gradient that is 0 everywhere, fails as well.
        worst = max(errors.items(), key=lambda item: item[1])
        assert all(error < 1e-10 for error in errors.values()), (worst, errors)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_share_a_sequence_like_one(run_ranks, family, method, documents):
    check(run_ranks, family, method, 1, 2, documents)
