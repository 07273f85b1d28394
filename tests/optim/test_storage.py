"""How state is stored: rounding, exact splits and block scales, against properties worked out by hand."""

import pytest
import torch
from torch import nn

from titan_moe.optim.rounding import BFLOAT16, FLOAT8, FLOAT16, join_master, places, round_by_chance, split_master
from titan_moe.optim.rounding import uniform as uniform_numbers
from titan_moe.optim.storage import BLOCK, Storage, storage_for

STEP = torch.tensor(3.0)


def random_bits(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)


def test_splitting_a_master_loses_nothing_and_rounds_to_nearest_with_ties_away_from_zero():
    bits = random_bits(200_000)
    ties = (bits[:1000] & ~0xFFFF) | 0x8000
    master = torch.cat((bits, ties)).view(torch.float32)
    master = master[master.isfinite()]
    upper, lower = split_master(master)
    assert upper.dtype == torch.bfloat16 and lower.dtype == torch.int16
    assert torch.equal(join_master(upper, lower).view(torch.int32), master.view(torch.int32))
    below = (master.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    above = ((master.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double()
    exact = master.double()
    want = torch.where((exact - below).abs() < (above - exact).abs(), below, above)
    assert torch.equal(upper.double()[above.isfinite()], want[above.isfinite()])


def test_masters_are_needed_in_ties():
    tie = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    assert tie.to(torch.bfloat16).item() == 1.0 and split_master(tie)[0].item() == 1.0078125


@pytest.mark.parametrize("form", [BFLOAT16, FLOAT16, FLOAT8], ids=lambda form: str(form.dtype))
def test_rounding_by_chance_gives_one_of_both_neighbours_and_the_right_mean(form):
    generator = torch.Generator().manual_seed(1)
    # Down to below the smallest normal number of the scaled formats.
    x = torch.randn(64, generator=generator) * 2.0 ** torch.randint(-9, 5, (64,), generator=generator)
    draws = 4000
    chance = torch.rand(draws, 64, generator=generator)
    got = round_by_chance(x.expand(draws, 64).contiguous(), form, chance).double()
    exact = x.double()
    nearest = x.to(form.dtype).double()
    gap = (got.amax(0) - got.amin(0)).clamp(min=(got.amax(0) - nearest).abs())
    # Neighbours: no representable number lies strictly between the two outcomes.
    middle = ((got.amax(0) + got.amin(0)) / 2).to(form.dtype).double()
    assert ((middle == got.amax(0)) | (middle == got.amin(0))).all()
    assert (got.amin(0) <= exact).all() and (exact <= got.amax(0)).all()
    # The mean of n draws, each of variance at most gap**2 / 4: within 5 deviations.
    assert ((got.mean(0) - exact).abs() <= 5 * gap / 2 / draws**0.5 + 1e-12).all()


def test_what_is_representable_is_never_changed():
    for form in (BFLOAT16, FLOAT16, FLOAT8):
        x = torch.randn(1000).to(form.dtype).float()
        assert torch.equal(round_by_chance(x, form, torch.rand(1000)).float(), x)


def test_random_numbers_depend_on_seed_step_and_place_and_are_uniform():
    index = places((300, 400), (0, 0), (300, 400), torch.device("cpu"))
    base = uniform_numbers(index, 5, STEP)
    assert torch.equal(base, uniform_numbers(index, 5, STEP.clone()))
    for other in (
        uniform_numbers(index, 6, STEP),
        uniform_numbers(index, 5, STEP + 1),
        uniform_numbers(index + 1, 5, STEP),
    ):
        correlation = torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1]
        assert correlation.abs() < 5 / 120_000**0.5
    counts = torch.histc(base, 100, 0, 1)
    # Chi-squared of 100 cells: mean 99, deviation 14.
    assert ((counts - 1200) ** 2 / 1200).sum() < 99 + 5 * 14.1
    assert base.min() >= 0 and base.max() < 1


def test_places_beyond_32_bits_differ():
    low, high = torch.arange(1000), torch.arange(1000) + 2**32
    assert not torch.equal(uniform_numbers(low, 1, STEP), uniform_numbers(high, 1, STEP))


def test_places_of_a_box_are_those_of_the_whole():
    whole = torch.arange(3 * 4 * 5).view(3, 4, 5)
    box = places((3, 4, 5), (1, 0, 2), (2, 3, 3), torch.device("cpu"))
    assert torch.equal(box, whole[1:3, 0:3, 2:5])


@pytest.mark.parametrize(("kind", "mantissa", "reach"), [("float16", 10, 38), ("float8", 3, 16)])
def test_block_scales_keep_the_precision_of_the_format(kind, mantissa, reach):
    generator = torch.Generator().manual_seed(2)
    # Blocks of very different size, the last one short.
    size = 2.0 ** torch.tensor([-60.0, 0.0, 40.0]).repeat_interleave(BLOCK)[: 2 * BLOCK + 7]
    x = torch.randn(4, 2 * BLOCK + 7, generator=generator) * size
    storage = storage_for("m", kind, nn.Parameter(x))
    state = storage.new(x)
    assert state["m"].element_size() == 2 - (kind == "float8") and state["m_scale"].shape == (4, 3)
    storage.write(state, x)
    got = storage.read(state, torch.float32)
    largest = torch.stack([block.abs().amax(1) for block in x.split(BLOCK, 1)], 1).repeat_interleave(BLOCK, 1)
    bound = torch.maximum(x.abs() * 2.0 ** -(mantissa + 1), largest[:, : x.shape[1]] * 2.0**-reach / 2)
    assert ((got - x).abs() <= bound).all()
    scale = state["m_scale"].float()
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


@pytest.mark.parametrize("kind", ["float16", "float8"])
def test_second_moments_never_become_zero_beside_a_large_one(kind):
    x = torch.zeros(1, BLOCK)
    x[0, :3] = torch.tensor([1.0, 1e-30, 1e-4])
    storage = storage_for("v", kind, nn.Parameter(x), square=True)
    state = storage.new(x)
    storage.write(state, x)
    got = storage.read(state, torch.float32)[0]
    assert 0 < got[1] <= 2.0**-30 and torch.equal(got[3:], torch.zeros(BLOCK - 3))
    torch.testing.assert_close(got[[0, 2]], x[0, [0, 2]], rtol=0.13, atol=0)


def test_zeros_are_stored_as_zeros_and_vectors_as_they_are():
    storage = storage_for("m", "float8", nn.Parameter(torch.ones(2, 40)))
    state = storage.new(torch.ones(2, 40))
    assert not storage.read(state, torch.float32).any()
    storage.write(state, torch.zeros(2, 40))
    assert not storage.read(state, torch.float32).any()
    assert storage_for("m", "float8", nn.Parameter(torch.ones(40))) == Storage("m", torch.float32)
