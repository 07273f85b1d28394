"""Each model family under data parallel: gradients as one process's in float64, and a bf16 step that stays finite."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

from titan_moe.config.job import Parallelism
from titan_moe.fsdp_ep import apply_fsdp
from titan_moe.models import build, token_losses
from titan_moe.moe import Router
from titan_moe.moe.balance import set_token_weight
from titan_moe.parallelize import build_meshes

SMALL = {"num_layers": 2, "vocab_size": 32, "z_loss_coef": 0.01}
FAMILIES = {
    "qwen3_moe": {"aux_loss_coef": 0.1},
    "mixtral": {},
    "gpt_oss": {},
    "glm4_moe": {"mtp_depth": 2, "mtp_own_embeddings": True},
    "deepseek_v3": {"mtp_depth": 1, "seq_aux_loss_coef": 0.1},
}


def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32, (4, 12), generator=generator)
    labels = torch.randint(32, (4, 12), generator=generator)
    for row in range(4):
        labels[row, : 3 * row] = -100
    documents = (torch.arange(12) >= 7).long().expand(4, 12)
    return ids, labels, documents


def step(model, rows):
    """Forward and backward of this loss's share of the global batch."""
    ids, labels, documents = (tensor[rows] for tensor in batch())
    weight = 1 / (batch()[1] != -100).sum().double()
    set_token_weight(model, weight)
    losses = token_losses(model(ids, document_ids=documents), labels, documents)
    (losses.total * weight).backward()


def gradient_errors(family):
    rank, world = dist.get_rank(), dist.get_world_size()
    oracle = build(family, "debug", **SMALL, **FAMILIES[family]).double()
    # The aux loss of a micro-batch is not linear in its tokens: the oracle takes the same micro-batches.
    for part in range(world):
        step(oracle, slice(part, None, world))
    mesh = build_meshes(Parallelism()).dense_fsdp
    model = apply_fsdp(build(family, "debug", **SMALL, **FAMILIES[family]).double(), mesh, keep_precision=(Router,))
    step(model, slice(rank, None, world))
    errors = {}
    for (name, got), (other, want) in zip(model.named_parameters(), oracle.named_parameters(), strict=True):
        assert name == other
        whole = torch.zeros_like(want) if want.grad is None else want.grad
        placed = distribute_tensor(whole, mesh, got.placements, src_data_rank=None).to_local()
        scale = whole.abs().max().clamp(min=1e-12)
        difference = (got.grad.to_local() - placed).abs()
        errors[name] = (difference.max() / scale).item() if difference.numel() else 0.0
    return errors


def bf16_step(family):
    model = build(family, "debug", **SMALL, **FAMILIES[family]).bfloat16()
    apply_fsdp(model, build_meshes(Parallelism()).dense_fsdp, keep_precision=(Router,))
    step(model, slice(dist.get_rank(), None, dist.get_world_size()))
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert routers and all(isinstance(router, FSDPModule) for router in routers)
    assert all(router.weight.grad.dtype == torch.float32 for router in routers)
    return all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_on_two_ranks_are_one_process_s(run_ranks, family):
    for errors in run_ranks(2, gradient_errors, family):
        assert len(errors) > 15 and max(errors.values()) < 1e-10, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_models_keep_their_fp32_router(run_ranks, family):
    assert run_ranks(2, bf16_step, family) == [True, True]
