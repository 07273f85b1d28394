"""Pipelines against one process: the model, the batch and the comparison that the pipeline tests share."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titan_moe import models
from titan_moe.config.job import Parallelism
from titan_moe.models import token_losses
from titan_moe.moe.balance import finish_step, set_token_weight
from titan_moe.parallelize.pipeline import Pipeline
from titan_moe.parallelize.stages import check_pipeline, split_model

SEQ_LEN, VOCAB = 10, 40
QWEN = {"dim": 16, "head_dim": 8, "hidden_dim": 8, "vocab_size": VOCAB, "num_experts": 4}
DEEPSEEK = {
    **{"dim": 16, "hidden_dim": 8, "ffn_dim": 24, "vocab_size": VOCAB, "shared_hidden_dim": 8, "q_lora_rank": 8},
    **{"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "num_experts": 8},
    **{"seq_aux_loss_coef": 0.01, "z_loss_coef": 0.001},
}


@dataclass
class Case:
    """One pipeline; ``rows`` are the sequences of one step."""

    schedule: str = "1F1B"
    pp: int = 2
    vpp: int = 1
    layout: str | None = None
    rows: int = 4
    microbatch: int = 1
    family: str = "qwen3_moe"
    override: dict[str, Any] = field(default_factory=dict)

    def parallelism(self) -> Parallelism:
        return Parallelism(
            pipeline_parallel_degree=self.pp,
            virtual_pipeline_degree=self.vpp,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_layout=self.layout,
            pipeline_parallel_microbatch_size=self.microbatch,
        )

    def config(self) -> models.ModelConfig:
        base = QWEN if self.family == "qwen3_moe" else DEEPSEEK
        return models.config(self.family, "debug", **{**base, "init_std": 0.2, **self.override})


def batch_of(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sequences of two or three documents each, with a different number of labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.rows, SEQ_LEN)
    ids, labels = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
    documents = (torch.rand(shape, generator=generator) < 0.2).long().cumsum(1)
    for row in range(case.rows):
        labels[row, : row % 4] = -100
    return {"input_ids": ids, "labels": labels, "document_ids": documents}


def weight_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return 1 / (batch["labels"] != -100).sum().double()


def one_process_step(model: models.Decoder, batch: dict[str, torch.Tensor], case: Case) -> torch.Tensor:
    """Gradients added, and the main and MTP sums."""
    weight, sums = weight_of(batch), torch.zeros(2, dtype=torch.float64)
    set_token_weight(model, weight)
    for start in range(0, case.rows, case.microbatch):
        part = {name: value[start : start + case.microbatch] for name, value in batch.items()}
        outputs = model(part["input_ids"], part["document_ids"])
        losses = token_losses(outputs, part["labels"], part["document_ids"], model.config.mtp_loss_weight)
        (losses.total * weight).backward()
        sums += torch.stack([losses.main_sum, losses.mtp_sum]).detach()
    return sums


def build(case: Case, prepare=lambda module: module) -> tuple[models.Decoder, Pipeline]:
    """The model in one process, and this rank's part of it as a pipeline over the first axis of the world."""
    config, parallelism = case.config(), case.parallelism()
    check_pipeline(parallelism, config, case.rows)
    mesh = init_device_mesh("cpu", (case.pp, dist.get_world_size() // case.pp), mesh_dim_names=("pp", "stage"))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        reference = models.from_config(config, seed=7)
        modules = split_model(config, parallelism, mesh["pp"].get_local_rank())
    finally:
        torch.set_default_dtype(default)
    for module in modules.values():
        prepare(module)
        module.to_empty(device="cpu")
        models.init_parameters(module, 7)
    group = mesh.get_group("pp")
    return reference, Pipeline(modules, parallelism, group, device=torch.device("cpu"), dtype=torch.float64)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item() if want.numel() else 0.0


def gradient_errors(reference: models.Decoder, pipeline: Pipeline) -> dict[str, float]:
    """Largest relative difference of each of this rank's gradients."""
    wanted = dict(reference.named_parameters())
    errors = {}
    for index, module in pipeline.by_index.items():
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, (index, name)
            errors[f"{index}:{name}"] = relative(parameter.grad, wanted[name].grad)
    return errors


def step_errors(case: Case) -> dict[str, float]:
    """Train, evaluate, train again on another batch, each against one process."""
    reference, pipeline = build(case)
    errors = {}
    for step in range(2):
        batch = batch_of(case, seed=step)
        want = one_process_step(reference, batch, case)
        got = pipeline.train_step(batch, weight_of(batch))
        dist.all_reduce(got)
        errors[f"loss {step}"] = relative(got, want)
        errors |= {f"{step} {name}": error for name, error in gradient_errors(reference, pipeline).items()}
        for model in (reference, *pipeline.modules):
            model.zero_grad()
            finish_step(model)

        odd = {name: value[:3, :7] for name, value in batch_of(case, seed=9).items()}
        reference.eval()
        with torch.no_grad():
            logits = reference(odd["input_ids"], odd["document_ids"])
        reference.train()
        got = pipeline.evaluate(odd)
        dist.all_reduce(got)
        errors[f"evaluation {step}"] = relative(got, token_losses(logits, odd["labels"]).main_sum.double())
        assert all(module.training for module in pipeline.modules)
    return errors
