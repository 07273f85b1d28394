"""A training run under a layout, as the trainer does it, and its distance from one process on every rank."""

import hashlib
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from model_case import (
    MAX_NORM,
    OPTIMIZER,
    Case,
    References,
    batch_of,
    box,
    initialise,
    local,
    on_meta,
    token_weight,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from titan_moe.config.degrees import resolve_degrees
from titan_moe.distributed import all_reduce_sum
from titan_moe.optim import build_optimizer, clip_grad_norm
from titan_moe.parallelize import build_meshes
from titan_moe.parallelize.build import build_model, compile_layers
from titan_moe.parallelize.context import shard_sequence
from titan_moe.parallelize.mesh import Meshes
from titan_moe.plugins.recompute import recompute_layers

EXACT = 1e-10
# A tensor whose largest element is this much smaller than the norm of all gradients counts as zero.
NEGLIGIBLE = 1e-6


class Run:
    """What one rank holds of a case."""

    def __init__(
        self, case: Case, meshes: Meshes, prepare: Callable[[nn.Module], nn.Module] = lambda module: module
    ) -> None:
        self.case, self.meshes = case, meshes
        d = meshes.degrees
        place = d.coordinates(dist.get_rank())[0]
        self.dp, self.cp_rank = d.dp_replicate * d.dp_shard, place["cp"]
        self.dp_rank = place["dp_replicate"] * d.dp_shard + place["dp_shard"]
        self.runner = build_model(
            case.config(),
            case.parallelism(),
            meshes,
            device=torch.device("cpu"),
            dtype=torch.float64,
            seed=None,
            prepare=partial(_prepared, case) if case.compile or case.recompute else prepare,
        )
        self.modules = nn.ModuleList(self.runner.modules)
        for module in self.modules:
            initialise(module)
        self.reports_loss = place["tp"] == 0 and self.runner.has_head
        self.optimizer = build_optimizer(self.modules, OPTIMIZER)

    def named(self, kind: str) -> list[tuple[str, Tensor]]:
        """``parameters`` or ``buffers`` under their global names."""
        return [pair for module in self.modules for pair in getattr(module, f"named_{kind}")()]

    def own(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Of the global batch this rank's part, by pass."""
        parts = [
            {name: tensor[rows] for name, tensor in batch.items()}
            for rows in self.case.rows_of(self.dp)[..., self.dp_rank]
        ]
        depth = self.case.config().mtp_depth
        return [shard_sequence(part, self.cp_rank, self.meshes.degrees.cp, mtp_depth=depth) for part in parts]

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        """Gradients of all passes; returns the main and MTP losses of the global batch."""
        weight, parts = token_weight(batch), self.own(batch)
        sums = sum(self.runner.train_step(part, weight, last=part is parts[-1]) for part in parts)
        return weight * all_reduce_sum(sums * self.reports_loss)

    def finish(self) -> tuple[Tensor, dict[str, Any]]:
        """Clip, step and close the step: the gradient norm and the report on MoE layers."""
        norm = clip_grad_norm(
            self.modules.parameters(), MAX_NORM, pp=self.meshes.degrees.pp, copies=self.runner.replicated_over_pp
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, self.runner.finish_step()


def _prepared(case: Case, module: nn.Module) -> nn.Module:
    if case.compile:
        # Of too many graphs the compiler gives up and runs the code as it is: it forgets other cases', and must not.
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        counters.clear()
        # All of it but code generation, whose sums have another order.
        backend = partial(torch.compile, backend="aot_eager_decomp_partition")
        with mock.patch.object(torch, "compile", backend):
            compile_layers(module)
    if case.recompute:
        recompute_layers(module)
    return module


@lru_cache(maxsize=2)
def _load(file: str) -> dict[str, Any]:
    return torch.load(file)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item() if want.numel() else 0.0


def run_part(parameter: Tensor, got: Tensor, whole: Tensor, floor: float = 1e-30) -> float:
    """Largest difference of this rank's part, over the largest magnitude of the whole."""
    offsets, sizes = box(parameter)
    part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    assert got.numel() == part.numel() and (got.shape == part.shape or not part.numel()), (got.shape, part.shape)
    return ((got - part).abs().max() / whole.abs().max().clamp(min=floor)).item() if part.numel() else 0.0


def run_layout(case: Case, file: str) -> tuple[dict[str, float], dict[str, tuple]]:
    """Train on this rank.

    Returns:
        relative errors by what was compared, and for each parameter which part it is and a digest of its bits.
    """
    if case.override.get("dispatcher") in ("deepep", "hybridep"):
        sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
    reference, errors = _load(file), {}
    run = Run(case, build_meshes(case.parallelism()))
    for step, want in enumerate(reference["steps"]):
        errors[f"step {step} losses"] = relative(run.backward(batch_of(case, step)), want["losses"])
        floor = NEGLIGIBLE * want["norm"].item()
        for name, parameter in run.named("parameters"):
            grad = parameter.grad
            assert grad is not None, name
            if isinstance(grad, DTensor):
                assert grad.placements == parameter.placements, (name, grad.placements, parameter.placements)
            error = run_part(parameter, local(grad), want["gradients"][name], floor)
            errors[f"step {step} gradient of {name}"] = error
        norm, report = run.finish()
        errors[f"step {step} norm"] = relative(norm, want["norm"])
        assert report.keys() == want["report"].keys() and report["names"] == want["report"]["names"]
        for key in report.keys() - {"names"}:
            errors[f"step {step} {key}"] = relative(report[key].double(), want["report"][key].double())
    assert step + 1 == case.steps
    if case.compile:
        assert counters["stats"]["unique_graphs"] > 0
    bits = {}
    for name, parameter in run.named("parameters"):
        part, weight = local(parameter.detach()), reference["weights"][name]
        errors[f"weight {name}"] = run_part(parameter, part, weight)
        bits[name] = (*box(parameter), hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest()[:16])
    for name, buffer in run.named("buffers"):
        errors[f"buffer {name}"] = relative(buffer.double(), reference["buffers"][name].double())
    return errors, bits


def check(case: Case, run_ranks, references: References, timeout: float = 300.0, run: Callable = run_layout) -> float:
    """Run ``case`` by ``run`` and compare all of it; returns the largest relative error."""
    d = resolve_degrees(case.parallelism(), case.ranks)
    file = references.file(case, d.dp_replicate * d.dp_shard)
    results = run_ranks(case.ranks, run, case, file, timeout=timeout)
    names = {name for name, _ in on_meta(case.config()).named_parameters()}
    assert {name for _, bits in results for name in bits} == names
    known: dict[tuple, str] = {}
    for rank, (errors, bits) in enumerate(results):
        wrong = {what: error for what, error in errors.items() if not error < EXACT}
        assert not wrong, f"rank {rank}: {dict(sorted(wrong.items(), key=lambda pair: -pair[1])[:12])}"
        # Ranks that hold the same part hold the same bits.
        for name, (offsets, sizes, digest) in bits.items():
            assert known.setdefault((name, offsets, sizes), digest) == digest, f"rank {rank}: {name} drifts apart"
    return max(max(errors.values()) for errors, _ in results)
