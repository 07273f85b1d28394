"""Models under FSDP2: initial weights, and rotary tables under mixed precision."""

import pytest
import torch
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titan_moe import models

TINY = {"dim": 32, "num_layers": 2, "hidden_dim": 16, "vocab_size": 40, "mtp_depth": 1}


def _sharded(ranks: int, dim: int, policy: MixedPrecisionPolicy) -> models.Decoder:
    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("meta"):
        model = models.build("deepseek_v3", "debug", **TINY)
    for module in [*model.layers.values(), *model.mtp.values(), model]:
        placement = None if dim == 0 else lambda p: Shard(dim if p.ndim > dim else 0)
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    model.to_empty(device="cpu")
    models.init_parameters(model, seed=4)
    return model


def _full_weights(ranks: int, dim: int) -> dict[str, torch.Tensor]:
    model = _sharded(ranks, dim, MixedPrecisionPolicy())
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("ranks, dim", [(3, 0), (2, 1)])
def test_sharded_init_is_bit_equal_to_one_process(run_ranks, ranks, dim):
    expected = dict(models.build("deepseek_v3", "debug", seed=4, **TINY).named_parameters())
    for weights in run_ranks(ranks, _full_weights, ranks, dim):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name


def _dtypes_inside(ranks: int) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    model = _sharded(ranks, 0, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    model.layers["1"].self_attn.register_forward_hook(
        lambda module, args, out: seen.append((args[0].dtype, args[1].cos.dtype, args[1].sin.dtype))
    )
    model(torch.arange(8)[None])
    return seen[0]


def test_mixed_precision_leaves_the_rotary_tables_in_fp32(run_ranks):
    assert run_ranks(2, _dtypes_inside, 2) == [(torch.bfloat16, torch.float32, torch.float32)] * 2
