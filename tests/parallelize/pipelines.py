"""Pipelines against one process: the model, the batch and the comparison that the pipeline tests share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_moe import models
from titan_moe.config.job import Parallelism
from titan_moe.distributed import local_box
from titan_moe.models import token_losses
from titan_moe.moe.balance import finish_step, set_token_weight
from titan_moe.optim import clip_grad_norm
from titan_moe.parallelize.apply import parallelize
from titan_moe.parallelize.context import shard_sequence
from titan_moe.parallelize.mesh import Meshes, build_meshes
from titan_moe.parallelize.pipeline import Pipeline
from titan_moe.parallelize.split import split_model
from titan_moe.parallelize.stages import check_pipeline

VOCAB = 40
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
    degrees: dict[str, Any] = field(default_factory=dict)
    """Other keys of ``Parallelism``; none: the stages stay plain modules."""
    seq_len: int = 12

    def parallelism(self) -> Parallelism:
        return Parallelism(
            pipeline_parallel_degree=self.pp,
            virtual_pipeline_degree=self.vpp,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_layout=self.layout,
            pipeline_parallel_microbatch_size=self.microbatch,
            **self.degrees,
        )

    def config(self) -> models.ModelConfig:
        base = QWEN if self.family == "qwen3_moe" else DEEPSEEK
        return models.config(self.family, "debug", **{**base, "init_std": 0.2, **self.override})


def batch_of(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sequences of two or three documents each, with a different number of labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.rows, case.seq_len)
    ids, labels = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
    documents = (torch.rand(shape, generator=generator) < 0.2).long().cumsum(1)
    for row in range(case.rows):
        labels[row, : row % 4] = -100
    return {"input_ids": ids, "labels": labels, "document_ids": documents}


def weight_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return 1 / (batch["labels"] != -100).sum().double()


def rows_of(batch: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    return {name: value[rank::size] for name, value in batch.items()}


def one_process_step(
    model: models.Decoder, batch: dict[str, torch.Tensor], case: Case, dp: int, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradients added, and the main and MTP sums; the micro-batches are those of all dp ranks."""
    weight = weight_of(batch) if weight is None else weight
    sums = torch.zeros(2, dtype=torch.float64)
    set_token_weight(model, weight)
    for start in range(0, case.rows // dp, case.microbatch):
        for rank in range(dp):
            own = rows_of(batch, rank, dp)
            part = {name: value[start : start + case.microbatch] for name, value in own.items()}
            outputs = model(part["input_ids"], part["document_ids"])
            losses = token_losses(outputs, part["labels"], part["document_ids"], model.config.mtp_loss_weight)
            (losses.total * weight).backward()
            sums += torch.stack([losses.main_sum, losses.mtp_sum]).detach()
    return sums


def build(
    case: Case, prepare: Callable[[models.Decoder], object] = lambda module: None
) -> tuple[models.Decoder, Pipeline]:
    """The model in one process, and this rank's part of it as a pipeline.

    Args:
        prepare: changes both, on meta, as plugins do.
    """
    config, parallelism = case.config(), case.parallelism()
    meshes = build_meshes(parallelism)
    check_pipeline(parallelism, config, case.rows // dp_place(meshes)[1])
    with torch.device("meta"):
        reference = models.from_config(config).double()
        modules = split_model(config, parallelism, meshes.dense.get_local_rank("pp"))
    for module in (reference, *modules.values()):
        prepare(module.double())
    for module in modules.values():
        if case.degrees:
            parallelize(
                module,
                meshes,
                sequence_parallel=parallelism.enable_sequence_parallel,
                cp_method=parallelism.context_parallel_method,
                reshard_after_forward=False,
            )
    for module in (reference, *modules.values()):
        module.to_empty(device="cpu")
        models.init_parameters(module, 7)
    return reference, Pipeline(modules, parallelism, meshes, device=torch.device("cpu"), dtype=torch.float64)


def dp_place(meshes: Meshes) -> tuple[int, int]:
    """This rank among those with other sequences, and their number."""
    place, degrees = meshes.degrees.coordinates(dist.get_rank())[0], meshes.degrees
    return place["dp_replicate"] * degrees.dp_shard + place["dp_shard"], degrees.dp_replicate * degrees.dp_shard


def own_part(batch: dict[str, torch.Tensor], pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """What this rank's pipeline is given of the global batch."""
    meshes, depth = pipeline.meshes, pipeline.model_config.mtp_depth
    own = rows_of(batch, *dp_place(meshes))
    return shard_sequence(own, meshes.dense.get_local_rank("cp"), meshes.degrees.cp, mtp_depth=depth)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item() if want.numel() else 0.0


def part_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of ``whole`` that this rank holds of ``like``."""
    if not isinstance(like, DTensor):
        return whole
    offsets, sizes = local_box(like)
    return whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_errors(reference: models.Decoder, pipeline: Pipeline) -> dict[str, float]:
    """Largest difference of this rank's part of each gradient, relative to the whole gradient."""
    wanted, errors = dict(reference.named_parameters()), {}
    for index, module in pipeline.by_index.items():
        for name, parameter in module.named_parameters():
            grad, want = local(parameter.grad), wanted[name].grad
            difference = grad - part_of(want, parameter)
            scale = want.abs().max().clamp(min=1e-12)
            errors[f"{index}:{name}"] = (difference.abs().max() / scale).item() if difference.numel() else 0.0
    return errors


def total_over_ranks(sums: torch.Tensor, pipeline: Pipeline) -> torch.Tensor:
    """Losses of the global batch: tp ranks all have those of their tokens."""
    dist.all_reduce(sums)
    return sums / pipeline.meshes.degrees.tp


def step_errors(case: Case, prepare: Callable[[models.Decoder], object] = lambda module: None) -> dict[str, float]:
    """Train, evaluate, train again on another batch, each against one process."""
    reference, pipeline = build(case, prepare)
    dp = dp_place(pipeline.meshes)[1]
    errors = {}
    for step in range(2):
        batch = batch_of(case, seed=step)
        want = one_process_step(reference, batch, case, dp)
        got = pipeline.train_step(own_part(batch, pipeline), weight_of(batch))
        errors[f"loss {step}"] = relative(total_over_ranks(got, pipeline), want)
        errors |= {f"{step} {name}": error for name, error in gradient_errors(reference, pipeline).items()}
        norm = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()]).norm()
        own = [parameter for module in pipeline.modules for parameter in module.parameters()]
        got = clip_grad_norm(own, 0.0, pp=case.pp, copies=pipeline.replicated_over_pp)
        errors[f"norm {step}"] = relative(got, norm)
        report, wanted = pipeline.finish_step(), finish_step(reference)
        assert report.keys() == wanted.keys() and report["names"] == wanted["names"]
        for key in wanted.keys() - {"names"}:
            assert report[key].dtype == wanted[key].dtype, key
            errors[f"{key} {step}"] = relative(report[key].double(), wanted[key].double())
        for model in (reference, *pipeline.modules):
            model.zero_grad()

        # Another shape than the training's, whose last micro-batch is smaller.
        odd = {name: value[: case.rows - 1 if dp == 1 else None, :8] for name, value in batch_of(case, 9).items()}
        reference.eval()
        with torch.no_grad():
            logits = reference(odd["input_ids"], odd["document_ids"])
        reference.train()
        got = pipeline.evaluate(own_part(odd, pipeline))
        errors[f"evaluation {step}"] = relative(
            total_over_ranks(got, pipeline), token_losses(logits, odd["labels"]).main_sum.double()
        )
        for module in pipeline.modules:
            assert module.training
            assert all(isinstance(p, DTensor) == bool(case.degrees) for p in module.parameters())
    return errors
