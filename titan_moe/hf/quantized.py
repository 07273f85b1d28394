"""Weights that hub checkpoints hold quantised: FP8 with 128 x 128 blocks, and MXFP4."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_moe.errors import CheckpointError

FP8_BLOCK = 128
# E2M1: sign, two exponent bits, one mantissa bit (OCP microscaling formats, v1.0).
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize_fp8(weight: Tensor, scale_inv: Tensor, name: str = "weight") -> Tensor:
    """``weight[..., R, C] * scale_inv`` with one scale per 128 x 128 block, in fp32.

    The block is always 128; rows // scale rows is another number when the last block is ragged.

    Raises:
        CheckpointError: when the scales' shape is not ``[..., ceil(R/128), ceil(C/128)]``.
    """
    check_fp8_scales(weight.shape, scale_inv.shape, name)
    rows, columns = weight.shape[-2:]
    scale = scale_inv.float()
    scale = scale.repeat_interleave(FP8_BLOCK, -2).narrow(-2, 0, rows)
    scale = scale.repeat_interleave(FP8_BLOCK, -1).narrow(-1, 0, columns)
    return weight.float() * scale


def check_fp8_scales(shape: Sequence[int], scales: Sequence[int], name: str) -> None:
    """Refuses scales that are not one per 128 x 128 block of a matrix.

    Raises:
        CheckpointError: naming both shapes.
    """
    if len(shape) < 2:
        raise CheckpointError(f"{name}: has FP8 scales but is not a matrix: shape {list(shape)}.")
    *lead, rows, columns = shape
    expected = [*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)]
    if list(scales) != expected:
        raise CheckpointError(
            f"{name}: scales of shape {list(scales)} for a weight of shape {list(shape)}; "
            f"blocks of {FP8_BLOCK} x {FP8_BLOCK} need {expected}."
        )


def quantize_fp8(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values and one fp32 scale per 128 x 128 block, so that a block's largest value becomes 448.

    Returns:
        ``weight [R, C]`` in float8_e4m3fn and ``scale_inv [ceil(R/128), ceil(C/128)]``; ``dequantize_fp8`` undoes it up
        to the rounding of E4M3 (at most 1/16 of each normal value). A block of zeros has the scale 1.
    """
    rows, columns = weight_RC.shape
    pad = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    wide = torch.nn.functional.pad(weight_RC.float(), pad)
    blocks = wide.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return values.to(torch.float8_e4m3fn), scale


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 ``blocks[E, rows, K/32, 16]`` and ``scales[E, rows, K/32]`` (both uint8) -> ``[E, K, rows]``.

    A byte holds two values, the low nibble first; a scale is a power of two with exponent bias 127.
    """
    E, rows, groups, half = blocks.shape
    table = torch.tensor(_FP4_VALUES, device=blocks.device)
    out = torch.empty(E, groups * half * 2, rows, dtype=dtype, device=blocks.device)
    # One expert at a time: the unpacked copies are several times the size of the blocks.
    for e in range(E):
        values = torch.stack((table[(blocks[e] & 15).int()], table[(blocks[e] >> 4).int()]), -1).flatten(-2)
        values = torch.ldexp(values, (scales[e].int() - 127).unsqueeze(-1))
        out[e] = values.flatten(-2).T
    return out
