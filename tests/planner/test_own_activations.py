"""Predicted bytes of saved activations against those that the real modules keep, on a CPU: within 5%."""

import pytest
import torch

from titan_moe import models
from titan_moe.config import JobConfig
from titan_moe.models.loss import token_losses
from titan_moe.planner.memory import kept_bytes
from titan_moe.planner.run import Options, plan_of
from titan_moe.planner.systems import system_of

OWN = Options(engine="titan", device="cpu", memory_efficient_permutation=True)


def measured(config: JobConfig) -> int:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.training.dtype))
    try:
        model = models.build(config.model.name, config.model.flavor, **config.model.override)
    finally:
        torch.set_default_dtype(default)
    storages = {}
    held = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            storages[storage._cdata] = storage
        return tensor

    shape = config.training.local_batch_size, config.training.seq_len
    ids = torch.randint(0, 200, shape)
    documents = torch.zeros(shape, dtype=torch.long) if config.training.document_mask else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_losses(model(ids, document_ids=documents), ids, documents, 0.3)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("override", "batch", "seq", "mask"),
    [
        ({}, 2, 256, True),
        ({"mtp_depth": 1}, 1, 128, False),
        ({"num_experts": 16, "top_k": 4, "num_layers": 6, "latent_dim": 32}, 1, 192, True),
    ],
)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_saved_bytes_are_those_measured(family, override, batch, seq, mask, dtype):
    config = JobConfig()
    config.model.name, config.model.override = family, override
    config.training.seq_len, config.training.local_batch_size = seq, batch
    config.training.document_mask, config.training.dtype = mask, dtype
    shape, run = plan_of(config, 1, OWN, system_of("h100"))
    assert kept_bytes(shape, run, run.stages[0]) == pytest.approx(measured(config), rel=0.05)
