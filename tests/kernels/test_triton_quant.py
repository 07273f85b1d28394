"""FP8 along rows and columns: the kernel against torch's own casts, and both against the definition."""

import pytest
import torch
from interpreter import by_triton

from titan_moe.kernels.quant_rowcol import GROUP, quant_rowcol, swizzled

FORMATS = ["mxfp8", "block"]


def matrix(R, N, dtype):
    """Magnitudes from below the smallest e4m3 to far above the largest, a group of zeros, and ties."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(R, N, generator=g) * torch.exp(6 * torch.randn(R, 1, generator=g))
    x[R // 2, : N // 2] = 0
    x[:2] = torch.arange(2 * N).view(2, N) / 16 - 3
    return x.to(dtype)


def flat(x, format):
    return [
        t.view(torch.uint8) if t.element_size() == 1 else t
        for q in quant_rowcol(x, format)
        for t in (q.codes, q.scales)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("R, N", [(128, 128), (32, 160), (130, 96), (7, 5)])
@pytest.mark.parametrize("format", FORMATS)
def test_kernel_equals_torch_bit_for_bit(format, R, N, dtype):
    x = matrix(R, N, dtype)
    got, want = by_triton(flat, x, format), flat(x, format)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("format", FORMATS)
def test_values_are_within_half_a_step_of_the_input(format):
    x, G = matrix(64, 256, torch.float32), GROUP[format]
    for q, source in zip(quant_rowcol(x, format), (x, x.t()), strict=True):
        rows, n = source.shape
        groups = -(-n // G)
        scales = q.scales
        if format == "mxfp8":
            index = swizzled(torch.arange(rows * groups).view(rows, groups) + 1)
            scales = torch.empty(rows * groups).index_put_((index[index > 0] - 1,), q.scales.float()[index > 0])
        scales = scales.view(rows, groups).repeat_interleave(G, 1)[:, :n].double()
        value, exact = q.codes.double() * scales, source.double()
        # Three bits of mantissa: half a step is 2^-4 of the value, and 2^-10 of the scale among the subnormals.
        assert ((value - exact).abs() <= (exact.abs() * 2**-4).maximum(scales * 2**-10) * (1 + 1e-6)).all()
        assert q.codes.double().abs().max() <= 448
        # No scale is wasted: the largest element of a group comes out in the upper half of the range.
        assert (q.codes.double().abs().amax(1) >= 224).all() or (source == 0).any()


def test_swizzle_by_hand():
    tile = swizzled(torch.arange(128 * 4, dtype=torch.int32).view(128, 4))
    for r, c in [(0, 0), (0, 3), (1, 0), (31, 2), (32, 0), (65, 1), (127, 3)]:
        assert tile[(r % 32) * 16 + (r // 32) * 4 + c] == 4 * r + c
    padded = swizzled(torch.ones(130, 5, dtype=torch.uint8))
    assert padded.numel() == 256 * 8 and padded.sum() == 650
    assert padded[2 * 512 + 512 + 0] == 1 and padded[2 * 512 + 512 + 1] == 0  # row 128, group 4, and group 5


def test_exact_powers_keep_their_scale():
    x = torch.full((1, 32), 448.0)
    q = quant_rowcol(x, "mxfp8")[0]
    assert q.scales.float()[0] == 1.0 and (q.codes.float() == 448).all()
    q = quant_rowcol(x * 1.01, "mxfp8")[0]
    assert q.scales.float()[0] == 2.0


@pytest.mark.parametrize("format", FORMATS)
def test_fault_38_no_rows_to_quantise(format):
    for q, shape in zip(quant_rowcol(torch.empty(0, 64), format), [(0, 64), (64, 0)], strict=True):
        assert q.codes.shape == shape
