"""FP8 along rows alone, and back: how the experts keep their pre-activation under ``save = "preact_fp8"``.

x ``[R, N]`` -> codes ``[R, N]`` (float8 e4m3) and one fp32 scale per 128 consecutive elements of a row, the largest
magnitude over 448: the ``block`` format of ``quant_rowcol``. Reads RN elements and writes 1 + 4 / 128 bytes for each;
back the other way round. Not differentiable; saves nothing. Both versions agree bit for bit.

**Error bound.** e4m3 has three bits of mantissa and rounds to nearest, so with s the scale an element comes back
within ``max(2^-4 |x|, 2^-10 s)``, s being at most the largest magnitude of its group over 448, and the rounding of
fp32 on top.
"""

import torch
from torch import Tensor

from titan_moe.kernels.language import rounded, tl, triton
from titan_moe.kernels.launch import launch
from titan_moe.kernels.library import operator
from titan_moe.kernels.quant_rowcol import GROUP, along_rows, quantise_tile

_GROUP = GROUP["block"]
_ROWS = 32


@triton.jit
def _tile(R, N, G: tl.constexpr, BR: tl.constexpr):
    """This program's rows of one group: their numbers, where the elements and the scales are, and which exist."""
    groups = tl.cdiv(N, G)
    group = tl.program_id(0) % groups
    r = (tl.program_id(0) // groups) * BR + tl.arange(0, BR)
    n = group * G + tl.arange(0, G)
    at = r.to(tl.int64)[:, None] * N + n[None, :]
    inside = (r < R)[:, None] & (n < N)[None, :]
    return r, at, inside, r.to(tl.int64) * groups + group


@triton.jit
def quant_rows_kernel(x, codes, scales, R, N, G: tl.constexpr, BR: tl.constexpr):
    r, at, inside, at_scale = _tile(R, N, G, BR)
    q, s = quantise_tile(tl.load(x + at, inside, other=0.0).to(tl.float32), BR, G, G, False)
    tl.store(codes + at, q, inside)
    tl.store(scales + at_scale, tl.reshape(s, [BR]), r < R)


@triton.jit
def dequant_rows_kernel(codes, scales, x, R, N, G: tl.constexpr, BR: tl.constexpr):
    r, at, inside, at_scale = _tile(R, N, G, BR)
    code = tl.load(codes + at, inside, other=0).to(tl.int32)
    exponent, mantissa = (code >> 3) & 15, code & 7
    # By integers, since sm_80 has no such type: normal numbers by their bits, others as multiples of 2^-9.
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
    value = tl.where((code & 127) == 127, float("nan"), value)
    value = tl.where(code > 127, -value, value)
    value *= tl.load(scales + at_scale, r < R, other=0.0)[:, None]
    tl.store(x + at, rounded(value, x.dtype.element_ty), inside)


def _quant_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    return along_rows(x, False)


def _programs(R: int, N: int) -> int:
    return -(-R // _ROWS) * -(-N // _GROUP)


def _quant_kernels(x: Tensor) -> tuple[Tensor, Tensor]:
    R, N = x.shape
    codes = x.new_empty(R, N, dtype=torch.uint8)
    scales = x.new_empty(R, -(-N // _GROUP), dtype=torch.float32)
    launch(quant_rows_kernel, _programs(R, N), x.contiguous(), codes, scales, R, N, G=_GROUP, BR=_ROWS, num_warps=4)
    return codes, scales


def _dequant_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    value = codes.view(torch.float8_e4m3fn).float()
    whole = codes.shape[1] // _GROUP * _GROUP
    value[:, :whole].unflatten(1, (-1, _GROUP)).mul_(scales[:, : whole // _GROUP, None])
    value[:, whole:].mul_(scales[:, whole // _GROUP :])
    return value.to(dtype)


def _dequant_kernels(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    R, N = codes.shape
    x = codes.new_empty(R, N, dtype=dtype)
    launch(dequant_rows_kernel, _programs(R, N), codes, scales, x, R, N, G=_GROUP, BR=_ROWS, num_warps=4)
    return x


quant_rows = operator("quant_rows(Tensor x) -> (Tensor, Tensor)", _quant_reference, _quant_kernels)
dequant_rows = operator(
    "dequant_rows(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor", _dequant_reference, _dequant_kernels
)
