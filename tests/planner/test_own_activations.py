"""Predicted bytes of saved activations against those that the real modules keep, on a CPU: within 5%."""

import pytest
import torch

from titan_moe import models
from titan_moe.config import JobConfig, model_overrides
from titan_moe.models.loss import token_losses
from titan_moe.planner.memory import kept_bytes
from titan_moe.planner.run import Options, plan_of
from titan_moe.planner.systems import system_of

OWN = Options(engine="titan", device="cpu", memory_efficient_permutation=True)


def planned(config: JobConfig) -> float:
    shape, run = plan_of(config, 1, OWN, system_of("h100"))
    return kept_bytes(shape, run, run.stages[0])


def measured(config: JobConfig) -> int:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.training.dtype))
    try:
        model = models.build(config.model.name, config.model.flavor, **model_overrides(config))
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


@pytest.mark.parametrize(("save", "z"), [("preact", 4 * 512), ("input", 0), ("preact_fp8", 512 + 4 * 4)])
def test_what_the_experts_keep_is_exact(save, z):
    """One layer of 64 experts, 8 for a token, with 2 x 256 pre-activations of a row, in fp32."""
    config = JobConfig()
    config.model.name = "qwen3_moe"
    config.model.override = {"num_layers": 1, "dim": 512, "hidden_dim": 256, "num_experts": 64, "top_k": 8}
    config.training.seq_len, config.training.local_batch_size = 256, 8
    config.training.document_mask = False
    plain, plain_bytes = planned(config), measured(config)
    config.moe.save = save
    # The experts' spare row is kept, too, in all three.
    less = 4 * 512 - z
    assert plain - planned(config) == 2048 * 8 * less
    assert plain_bytes - measured(config) == (2048 * 8 + 1) * less


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
    assert planned(config) == pytest.approx(measured(config), rel=0.05)
