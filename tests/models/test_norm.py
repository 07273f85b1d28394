"""RMSNorm's own backward pass against torch's."""

import pytest
import torch
import torch.nn.functional as F

from titan_moe.models.norm import RMSNorm


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_value_and_gradients_equal_the_library(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(24, eps=0.1, dtype=dtype)
    torch.nn.init.normal_(norm.weight, generator=generator)
    # Not contiguous, as a head's queries are.
    x = torch.randn(3, 24, 5, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_()
    grad = torch.randn(3, 5, 24, generator=generator, dtype=torch.float64).to(dtype)
    y = norm(x)
    y.backward(grad)
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = F.rms_norm(wide_x, (24,), wide_weight, 0.1)
    expected.backward(grad.double())
    assert y.dtype == x.grad.dtype == dtype
    # Rounding of the dtype; the weight's gradient sums 15 terms of order 1.
    for actual, wanted in ((y, expected), (x.grad, wide_x.grad), (norm.weight.grad, wide_weight.grad)):
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_row_of_zeros_has_a_finite_gradient():
    norm = RMSNorm(4, eps=1e-6)
    torch.nn.init.ones_(norm.weight)
    x = torch.zeros(1, 4, requires_grad=True)
    norm(x).sum().backward()
    # The slope at 0 is 1 / sqrt(eps).
    torch.testing.assert_close(x.grad, torch.full((1, 4), 1e3))
