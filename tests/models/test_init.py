"""Initial weights are the same under every sharding, drawn piece by piece."""

import itertools

import pytest
import torch
from torch import nn

from titan_moe import models
from titan_moe.models.init import BLOCK, draw_box

# Rows longer and shorter than a block, sizes that divide by nothing, one block and several.
SHAPES = [(7,), (300, 517), (3, 2, 250, 131), (2, 2 * BLOCK + 3), (5, 1, 70001)]


def _full(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return draw_box("w", shape, (0,) * len(shape), shape, seed, 0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shard_of_every_dim_is_bit_equal_to_the_full_tensor(shape):
    full = _full(shape)
    for dim, parts in itertools.product(range(len(shape)), (2, 3)):
        size = -(-shape[dim] // parts)
        for start in range(0, shape[dim], size):
            length = min(size, shape[dim] - start)
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, length
            piece = draw_box("w", shape, offsets, sizes, 0, 0.02)
            assert torch.equal(piece, full.narrow(dim, start, length)), (dim, start)


def test_a_box_cut_in_every_dim_is_bit_equal_to_the_full_tensor():
    shape, offsets, sizes = (3, 2, 250, 531), (1, 1, 100, 7), (2, 1, 149, 500)
    box = draw_box("w", shape, offsets, sizes, 0, 0.02)
    slices = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    assert torch.equal(box, _full(shape)[slices])


def test_an_empty_box_is_empty():
    assert draw_box("w", (4, 8), (4, 0), (0, 8), 0, 1.0).shape == (0, 8)


def test_draws_are_normal_and_differ_by_name_seed_and_block():
    full = _full((4 * BLOCK,))
    # Four standard errors of the mean and of the standard deviation of 262,144 draws.
    assert abs(full.mean().item()) < 4 * 0.02 / 512
    assert abs(full.std().item() / 0.02 - 1) < 4 / 724
    blocks = [
        *full.split(BLOCK),
        *_full((BLOCK,), seed=1).split(BLOCK),
        draw_box("v", (BLOCK,), (0,), (BLOCK,), 0, 0.02),
    ]
    for a, b in itertools.combinations(blocks, 2):
        assert not torch.equal(a, b)


def test_peak_memory_is_that_of_the_shard():
    # A tensor of 4 PiB: only a shard of it can be drawn.
    shape = (1 << 20, 1 << 30)
    piece = draw_box("w", shape, (12345, 678), (3, 5), 0, 1.0)
    assert torch.equal(piece[1:], draw_box("w", shape, (12346, 678), (2, 5), 0, 1.0))


def test_kinds_of_parameters():
    model = models.build("gpt_oss", "debug", dim=32, hidden_dim=16, init_std=0.5)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight")):
            assert (parameter == 1).all(), name
        elif name.endswith((".bias", ".b1", ".b2", ".sinks")):
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.5, rel=0.2), name


def test_wrappers_do_not_change_the_weights():
    plain = models.build("qwen3_moe", "debug", dim=32)
    wrapped = models.build("qwen3_moe", "debug", dim=32, seed=5)
    wrapped.layers["0"] = _Wrapper(wrapped.layers["0"])
    models.init_parameters(wrapped, seed=0)
    assert torch.equal(wrapped.layers["0"]._checkpoint_wrapped_module.mlp.experts.w1, plain.layers["0"].mlp.experts.w1)


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = inner


def test_a_model_on_meta_is_an_invariant_violated():
    with torch.device("meta"):
        model = models.build("qwen3_moe", "debug")
    with pytest.raises(AssertionError, match="to_empty first"):
        models.init_parameters(model, seed=0)
