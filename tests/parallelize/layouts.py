"""One training step under a layout, against the same step of one process, in float64, on every rank."""

import functools

import torch
import torch.distributed as dist

from titan_moe.config.job import Parallelism
from titan_moe.distributed import local_box
from titan_moe.models import build, token_losses
from titan_moe.moe.balance import set_token_weight
from titan_moe.parallelize import build_meshes, parallelize
from titan_moe.parallelize.context import shard_sequence

VOCAB = 30
COMMON = {"num_layers": 2, "vocab_size": VOCAB, "dim": 16, "hidden_dim": 12, "num_experts": 7, "top_k": 2}
GQA = {**COMMON, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "router_dtype": "float64"}
MLA = {
    **COMMON,
    "num_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "ffn_dim": 20,
    "num_groups": 1,
    "topk_groups": 1,
    "shared_hidden_dim": 12,
    "router_dtype": "float64",
}
TINY = {
    "qwen2_moe": {**GQA, "shared_hidden_dim": 12, "aux_loss_coef": 0.1},
    "minimax_m2": {**GQA, "rotary_dims": 2},
    "qwen3_moe": {**GQA, "aux_loss_coef": 0.1, "z_loss_coef": 0.01},
    "mixtral": {**GQA, "sliding_window": 4},
    "gpt_oss": {**GQA, "sliding_window": 3},
    "glm4_moe": {**GQA, "ffn_dim": 20, "shared_hidden_dim": 12},
    "deepseek_v3": {**MLA, "mtp_depth": 1, "seq_aux_loss_coef": 0.1},
    "kimi_k2": MLA,
}


@functools.cache
def _drawn(shape, name):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def build_tiny(family, **override):
    """A float64 model whose every parameter, norms and biases too, has random values."""
    torch.set_default_dtype(torch.float64)
    try:
        model = build(family, "debug", **{**TINY[family], **override})
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and "norm" in name
            parameter.copy_(_drawn(tuple(parameter.shape), name) * 0.2 + (1.0 if norm else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(_drawn(tuple(buffer.shape), name) * 0.05)
    return model.train()


def make_batch(rows, seq_len):
    """Ids, labels of which a third is ignored, and two documents a row."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (rows, seq_len), generator=generator)
    labels = torch.randint(VOCAB, (rows, seq_len), generator=generator)
    ignored = torch.rand(rows, seq_len, generator=generator) < 0.3
    ignored[0, 0] = False
    documents = (torch.arange(seq_len) >= (seq_len + 1) // 2).long().expand(rows, seq_len)
    return ids, labels.masked_fill(ignored, -100), documents


def train_step(model, batch, rows, padding=False, cp=(0, 1)):
    """Forward and backward of some rows of the batch, with the loss of the whole batch's mean.

    Returns the rows' loss as a sum; under context parallelism, that of this rank's positions.
    """
    part = dict(zip(("input_ids", "labels", "document_ids"), (tensor[rows] for tensor in batch), strict=True))
    weight = 1 / (batch[1] != -100).sum().double()
    set_token_weight(model, weight)
    if padding:
        part["valid"] = torch.ones_like(part["input_ids"], dtype=torch.bool)
        part["valid"][:, -1] = False
    part = shard_sequence(part, *cp, mtp_depth=len(getattr(model, "mtp", ())))
    labels, mtp_labels = part.pop("labels"), part.pop("mtp_labels", None)
    outputs = model(part.pop("input_ids"), **part)
    losses = token_losses(outputs, labels, part["document_ids"], mtp_labels=mtp_labels)
    (losses.total * weight).backward()
    return losses.total.detach()


def reference(family, batch, dp, padding=False, **override):
    """Losses by dp rank and gradients by name of one process, which takes the ranks' micro-batches in turn."""
    model = build_tiny(family, **override)
    losses = [train_step(model, batch, slice(r, None, dp), padding) for r in range(dp)]
    return losses, {name: p.grad for name, p in model.named_parameters()}, model


def gradient_errors(model, gradients):
    """Largest error of this rank's part of each gradient, relative to the largest element of the whole."""
    errors = {}
    for name, parameter in model.named_parameters():
        whole = gradients.get(name)
        if whole is None:
            whole = torch.zeros(parameter.shape, dtype=torch.float64)
        assert not any(p.is_partial() for p in parameter.grad.placements), name
        assert parameter.grad.placements == parameter.placements, name
        offsets, sizes = local_box(parameter)
        part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        got = parameter.grad.to_local()
        assert got.shape == part.shape, (name, got.shape, part.shape)
        scale = whole.abs().max().clamp(min=1e-8)
        errors[name] = ((got - part).abs().max() / scale).item() if part.numel() else 0.0
    assert errors.keys() >= gradients.keys()
    return errors


def compare(family, degrees, rows, seq_len, sequence_parallel=True, padding=False, override=(), reshard=True):
    """On this rank: relative error of the loss, and the largest gradient error with its name."""
    override = dict(override)
    meshes = build_meshes(Parallelism(**degrees))
    d = meshes.degrees
    dp = d.dp_replicate * d.dp_shard
    batch = make_batch(rows, seq_len)
    losses, gradients, _ = reference(family, batch, dp, padding, **override)
    model = parallelize(
        build_tiny(family, **override), meshes, sequence_parallel=sequence_parallel, reshard_after_forward=reshard
    )
    place = d.coordinates(dist.get_rank())[0]
    dp_rank = place["dp_replicate"] * d.dp_shard + place["dp_shard"]
    loss = train_step(model, batch, slice(dp_rank, None, dp), padding, (place["cp"], d.cp))
    dist.all_reduce(loss, group=meshes.dense["cp"].get_group())
    loss_error = ((loss - losses[dp_rank]).abs() / losses[dp_rank].abs().clamp(min=1)).item()
    errors = gradient_errors(model, gradients)
    name = max(errors, key=errors.get)
    return loss_error, errors[name], name
