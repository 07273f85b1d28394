"""Summed cross-entropy: hand-made values, gradients, ignored labels, MTP labels."""

import math

import pytest
import torch
import torch.nn.functional as F

from titan_moe.models import token_losses
from titan_moe.models.loss import cross_entropy_sum


def test_hand_made_values():
    # Odds 1 : 3 for the two tokens; a third token has no weight at all.
    logits = torch.tensor([[[0.0, math.log(3.0), -math.inf]] * 3])
    losses = token_losses(logits, torch.tensor([[0, 1, -100]]))
    assert losses.main_sum.item() == pytest.approx(math.log(4) + math.log(4 / 3))
    assert losses.mtp_sum.item() == 0
    assert losses.total.item() == losses.main_sum.item()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_value_and_gradient_equal_the_library(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    labels[0, :3] = -100
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy_sum(ours, labels)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    expected = F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * 0.5).backward()
    (expected * 0.5).backward()
    # The inputs are equal, so bf16 enters only in the gradient, rounded to 8 bits.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5 if dtype != torch.float64 else 1e-13, atol=0)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance)


def test_an_ignored_position_cannot_spoil_the_loss_or_its_gradient():
    logits = torch.zeros(1, 2, 4)
    logits[0, 1] = math.inf
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, torch.tensor([[2, -100]]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4))
    assert torch.equal(logits.grad[0, 1], torch.zeros(4))


def test_a_batch_without_labels_has_no_loss_and_no_gradient():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((1, 3), -100))
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def _sure_of(tokens: list[int]) -> torch.Tensor:
    """Logits that put all weight on one token per position, so that the loss is 0 there and 100 elsewhere."""
    return F.one_hot(torch.tensor([tokens]), 12).double() * 100


def test_mtp_labels_are_shifted_and_weighted():
    labels = torch.tensor([[1, 2, 3, 4, -100]])
    main = _sure_of([1, 2, 3, 0, 0])  # wrong once
    first = _sure_of([2, 3, 0, 0, 0])  # labels 2 3 4 - -: wrong once
    second = _sure_of([0, 0, 0, 0, 0])  # labels 3 4 - - -: wrong twice
    losses = token_losses((main, first, second), labels, mtp_weight=0.5)
    assert losses.main_sum.item() == pytest.approx(100)
    assert losses.mtp_sum.item() == pytest.approx(300)
    assert losses.total.item() == pytest.approx(100 + 0.5 / 2 * 300)


def test_mtp_labels_do_not_cross_documents():
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    document_ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    main = _sure_of([1, 2, 3, 4, 5, 6])
    # Labels of depth 1: 2 3 - 5 6 -; of depth 2: 3 - - 6 - -. Token 0 is always wrong.
    wrong = _sure_of([0] * 6)
    losses = token_losses((main, wrong, wrong), labels, document_ids)
    assert losses.mtp_sum.item() == pytest.approx(100 * (4 + 2))
    assert token_losses((main, wrong, wrong), labels).mtp_sum.item() == pytest.approx(100 * (5 + 4))


def test_fp32_logits_are_not_copied_in_forward():
    logits = torch.randn(64, 1000, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cross_entropy_sum(logits, torch.zeros(64, dtype=torch.long))
    large = [t for t in saved if t.numel() == logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]
