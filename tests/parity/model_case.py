"""One model, one batch, one layout: what it is, and the same training in one process.

Relative errors here are the largest difference over the largest magnitude of the whole reference tensor.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe import models
from titan_moe.config.job import Optimizer, Parallelism
from titan_moe.distributed import local_box
from titan_moe.models import Decoder, ModelConfig, token_losses
from titan_moe.models.init import draw_box, init_parameters
from titan_moe.moe.balance import finish_step, set_token_weight
from titan_moe.optim import build_optimizer

STEPS = 3
MAX_NORM = 0.25
OPTIMIZER = Optimizer(lr=3e-3, weight_decay=0.1, implementation="fused")

_COMMON = {"vocab_size": 40, "dim": 16, "num_layers": 4, "num_heads": 8, "hidden_dim": 8, "num_experts": 8, "top_k": 2}
_LOSSES = {"seq_aux_loss_coef": 0.05, "z_loss_coef": 0.01}
_GQA = {**_COMMON, **_LOSSES, "num_kv_heads": 4, "head_dim": 4}
_MLA = {
    **_COMMON,
    **_LOSSES,
    **{"ffn_dim": 24, "num_dense_layers": 1, "shared_hidden_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 12},
    **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "bias_update_speed": 0.01},
}
TINY: dict[str, dict[str, Any]] = {
    # Latent attention, a dense layer, a shared expert, sigmoid scores with bias in groups, MTP.
    "deepseek_v3": {**_MLA, "num_groups": 4, "topk_groups": 2, "mtp_depth": 1},
    "kimi_k2": _MLA,
    # Grouped queries with norms, MoE in every layer.
    "qwen3_moe": _GQA,
    "mixtral": {**_GQA, "sliding_window": 5},
    "gpt_oss": {**_GQA, "sliding_window": 5},
    # A gated shared expert, biased projections.
    "qwen2_moe": {**_GQA, "shared_hidden_dim": 8},
    # Norms over all heads.
    "minimax_m2": {**_GQA, "rotary_dims": 2, "bias_update_speed": 0.01},
    "glm4_moe": {**_GQA, "ffn_dim": 24, "num_dense_layers": 1, "shared_hidden_dim": 8},
}


@dataclass
class Case:
    """A layout with the model and the batches that it trains.

    Attributes:
        degrees: keys of ``Parallelism``.
        override: fields of the model's or its MoE layers' config.
        rows: sequences of an optimizer step, over all ranks and passes.
        passes: forward and backward passes that are accumulated.
        padding: every sequence ends in tokens that are not valid.
        steps: of the optimizer.
    """

    family: str = "deepseek_v3"
    degrees: dict[str, Any] = field(default_factory=dict)
    override: dict[str, Any] = field(default_factory=dict)
    rows: int = 16
    seq_len: int = 16
    passes: int = 1
    ranks: int = 8
    recompute: bool = False
    compile: bool = False
    padding: bool = False
    steps: int = STEPS

    def parallelism(self) -> Parallelism:
        return Parallelism(**self.degrees)

    def config(self) -> ModelConfig:
        return models.config(self.family, "debug", **{**TINY[self.family], "init_std": 0.2, **self.override})

    def local_rows(self, dp: int) -> int:
        """Sequences of one rank and pass."""
        return self.rows // (dp * self.passes)

    def rows_of(self, dp: int) -> Tensor:
        """Row numbers ``[passes, local_rows, dp]``; each rank and pass has a column."""
        return torch.arange(self.rows).view(self.passes, -1, dp)


def batch_of(case: Case, step: int) -> dict[str, Tensor]:
    """Sequences of some documents each, with different numbers of labels; the first has none."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape, vocab = (case.rows, case.seq_len), case.config().vocab_size
    ids, labels = (torch.randint(vocab, shape, generator=generator) for _ in range(2))
    unlabelled = torch.rand(shape, generator=generator) < 0.25
    documents = (torch.rand(shape, generator=generator) < 0.15).long().cumsum(1)
    unlabelled[0] = True
    unlabelled[-1, 0] = False
    batch = {"input_ids": ids, "document_ids": documents}
    if case.padding:
        lengths = torch.randint(1, case.seq_len + 1, (case.rows, 1), generator=generator)
        batch["valid"] = torch.arange(case.seq_len) < lengths
        unlabelled |= ~batch["valid"]
    return batch | {"labels": labels.masked_fill(unlabelled, -100)}


def token_weight(batch: dict[str, Tensor]) -> Tensor:
    return 1 / (batch["labels"] != -100).sum().double()


def on_meta(config: ModelConfig) -> Decoder:
    """The model in float64 on meta."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            return models.from_config(config)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """The weights of a seed; norms, biases, sinks and selection biases leave their neutral values."""
    init_parameters(module, 3)
    for name, parameter in module.named_parameters():
        neutral = parameter.ndim == 1 or name.rpartition(".")[2] in ("b1", "b2")
        if neutral:
            part, (offsets, sizes) = local(parameter), box(parameter)
            if part.numel():
                part.add_(draw_box(name, parameter.shape, offsets, sizes, 4, 0.1).to(part.dtype))
    for name, buffer in module.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(draw_box(name, buffer.shape, (0,), buffer.shape, 5, 0.05))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's part."""
    return local_box(tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.ndim, tuple(tensor.shape))


def micro_batches(case: Case, dp: int) -> list[Tensor]:
    """Row numbers of what the reference takes at once.

    Losses are sums over tokens, so that any grouping gives the same gradients; but the auxiliary loss of a micro-batch
    depends on it, and the global one on what came before it on all ranks.
    """
    moe = case.config().moe
    if not moe.aux_loss_coef and not moe.global_aux_loss_coef:
        return [torch.arange(case.rows)]
    assert not (moe.aux_loss_coef and moe.global_aux_loss_coef), "one process cannot group for both"
    pipelined = case.parallelism().pipeline_parallel_degree > 1
    size = case.parallelism().pipeline_parallel_microbatch_size if pipelined else case.local_rows(dp)
    pieces = [piece for rows in case.rows_of(dp) for piece in rows.split(size)]
    if moe.global_aux_loss_coef:
        return [piece.flatten() for piece in pieces]
    return [piece[:, rank] for piece in pieces for rank in range(dp)]


def reference_key(case: Case, dp: int) -> str:
    """Equal for cases that one run in one process serves."""
    shared = "family", "rows", "seq_len", "padding", "steps"
    keys = {name: value for name, value in asdict(case).items() if name in shared}
    keys["override"] = {name: value for name, value in case.override.items() if name != "dispatcher"}
    keys["groups"] = [rows.tolist() for rows in micro_batches(case, dp)]
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:24]


def build_alone(case: Case, **override: Any) -> Decoder:
    """The model as a plain module."""
    own = {"dispatcher": "local", **override}
    model = on_meta(
        models.config(case.family, "debug", **{**TINY[case.family], "init_std": 0.2, **case.override, **own})
    )
    initialise(model.to_empty(device="cpu"))
    return model.train()


def gradients_alone(model: Decoder, case: Case, batch: dict[str, Tensor], dp: int) -> Tensor:
    """Adds to the gradients; returns main and MTP losses summed over tokens."""
    weight, sums = token_weight(batch), torch.zeros(2, dtype=torch.float64)
    set_token_weight(model, weight)
    for rows in micro_batches(case, dp):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        labels = part.pop("labels")
        losses = token_losses(
            model(part.pop("input_ids"), **part), labels, part["document_ids"], model.config.mtp_loss_weight
        )
        (losses.total * weight).backward()
        sums += torch.stack([losses.main_sum, losses.mtp_sum]).detach()
    return sums


def train_alone(case: Case, dp: int) -> dict[str, Any]:
    """Per step: losses, gradients, their norm and the report on MoE layers; then the weights and buffers."""
    model = build_alone(case)
    optimizer = build_optimizer(model, OPTIMIZER)
    steps = []
    for step in range(case.steps):
        batch = batch_of(case, step)
        losses = gradients_alone(model, case, batch, dp) * token_weight(batch)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for parameter in model.parameters():
            parameter.grad *= (MAX_NORM / (norm + 1e-6)).clamp(max=1)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"losses": losses, "gradients": gradients, "norm": norm, "report": finish_step(model)})
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"steps": steps, "weights": weights, "buffers": dict(model.named_buffers())}


class References:
    """Runs in one process, by model and batch, each made once and kept in a file for the ranks to read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, case: Case, dp: int) -> str:
        file = self.folder / f"{reference_key(case, dp)}.pt"
        if not file.exists():
            torch.save(train_alone(case, dp), file)
        return str(file)
