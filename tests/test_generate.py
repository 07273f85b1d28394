"""Sampling: every temperature that is let in gives a distribution."""

import pytest
import torch
from torch import nn

from titan_moe.generate import sample


class Fixed(nn.Module):
    """The same logits for every token."""

    class config:
        max_seq_len = 4

    def forward(self, input_ids_BS):
        return torch.tensor([0.5, 3.0, -2.0, 2.9]).expand(*input_ids_BS.shape, 4)


def draw(temperature: float, count: int, top_k: int = 0) -> list[int]:
    options = {"max_new_tokens": count, "temperature": temperature, "top_k": top_k, "seed": 0, "eos_id": 9}
    return list(sample(Fixed(), [0], vocab_size=4, **options))


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-45, 5e-324])
def test_a_low_temperature_takes_the_likeliest_token(temperature):
    assert draw(temperature, 8) == [1] * 8


def test_tokens_come_as_often_as_the_softmax_says():
    drawn = torch.tensor(draw(2.0, 2000)).bincount(minlength=4) / 2000
    expected = torch.tensor([0.5, 3.0, -2.0, 2.9]).div(2.0).softmax(0)
    # Four standard deviations of a share of 2,000 draws are below 0.045.
    assert torch.allclose(drawn, expected, rtol=0, atol=0.045)


def test_top_k_and_any_temperature_leave_out_the_others():
    assert set(draw(1e300, 200, top_k=2)) == {1, 3}
