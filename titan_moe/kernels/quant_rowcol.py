"""Quantise a matrix to FP8 along its rows and along its columns, in one read.

x ``[R, N]`` -> codes along rows ``[R, N]`` and along columns ``[N, R]`` (transposed, as a product over R wants them),
both ``float8_e4m3fn``, with one scale per group of consecutive elements:

- ``mxfp8``: groups of 32, scales of 8-bit exponents (``float8_e8m0fnu``), the least power of two that keeps the group
  within 448. They come in the order that the tensor cores of sm_100 read: tiles of 128 rows by 4 groups, in which row r
  and group c lie at ``(r % 32) 16 + (r / 32) 4 + c``; rows and groups are filled up to whole tiles by 0.
- ``block``: groups of 128, fp32 scales ``[rows, groups]``, the largest magnitude over 448 (DeepSeek-V3, section 3.3).

Reads 2RN bytes of bfloat16 and writes 2RN bytes of codes, besides the scales: 4.06 bytes per element for ``mxfp8``,
where two passes take 6.06. Both versions round to nearest even and agree bit for bit. Not differentiable; saves
nothing.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_moe.kernels.language import tl, triton
from titan_moe.kernels.launch import launch
from titan_moe.kernels.library import operator

Format = Literal["mxfp8", "block"]
GROUP = {"mxfp8": 32, "block": 128}


@triton.jit
def _e4m3(x):
    """Codes of float8 e4m3 as uint8, to nearest even, for |x| <= 448; by integers, since sm_80 has no such type."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 255).to(tl.int32) - 127, -6)
    # x in units of its last place: at most 16, so that adding 1.5 x 2^23 rounds it.
    unit = ((127 + 3 - exponent) << 23).to(tl.float32, bitcast=True)
    steps = (tl.abs(x) * unit + 12582912.0) - 12582912.0
    code = steps.to(tl.int32) + ((exponent + 6) << 3)
    code = tl.where(x == x, code, 127)
    return (code | ((bits >> 31) << 7).to(tl.int32)).to(tl.uint8)


@triton.jit
def quantise_tile(x, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, MX: tl.constexpr):
    """Codes ``[M, N]`` and scales ``[M, N / G]`` of a tile, along its second dim."""
    groups = tl.reshape(x, [M, N // G, G])
    most = tl.max(tl.abs(groups), 2)
    nan = tl.max((groups != groups).to(tl.int32), 2) > 0
    ratio = most / 448.0
    if MX:
        bits = ratio.to(tl.uint32, bitcast=True).to(tl.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, 1), 254)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        # 2^-127 is no normal number: 1 / 2^127 has to be made of its bits.
        inverse = tl.where(exponent == 254, 5.877471754111438e-39, inverse)
        scales = tl.where(nan, 255, exponent).to(tl.uint8)
        scaled = groups * inverse[:, :, None]
    else:
        scales = tl.where(nan, float("nan"), tl.where(most > 0, ratio, 1.0))
        scaled = groups / scales[:, :, None]
    return tl.reshape(_e4m3(scaled), [M, N]), scales


@triton.jit
def _store_scales(scales, out, row, group, rows, groups, MX: tl.constexpr):
    inside = (row < rows)[:, None] & (group < groups)[None, :]
    if MX:
        r, c = row[:, None], group[None, :]
        tile = (r // 128).to(tl.int64) * ((groups + 3) // 4) + c // 4
        at = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    else:
        at = row.to(tl.int64)[:, None] * groups + group[None, :]
    tl.store(out + at, scales, inside)


@triton.jit
def quant_rowcol_kernel(
    x,
    codes,
    scales,
    codes_t,
    scales_t,
    R,
    N,
    G: tl.constexpr,
    MX: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks_n = tl.cdiv(N, TILE)
    block_r, block_n = tl.program_id(0) // blocks_n, tl.program_id(0) % blocks_n
    r = block_r * TILE + tl.arange(0, TILE)
    n = block_n * TILE + tl.arange(0, TILE)
    g = tl.arange(0, TILE // G)
    inside = (r < R)[:, None] & (n < N)[None, :]
    at = r.to(tl.int64)[:, None] * N + n[None, :]
    tile = tl.load(x + at, inside, other=0.0).to(tl.float32)
    q, s = quantise_tile(tile, TILE, TILE, G, MX)
    tl.store(codes + at, q, inside)
    _store_scales(s, scales, r, block_n * (TILE // G) + g, R, tl.cdiv(N, G), MX)
    q, s = quantise_tile(tl.trans(tile), TILE, TILE, G, MX)
    tl.store(codes_t + n.to(tl.int64)[:, None] * R + r[None, :], q, (n < N)[:, None] & (r < R)[None, :])
    _store_scales(s, scales_t, n, block_r * (TILE // G) + g, N, tl.cdiv(R, G), MX)


def _scale_shape(rows: int, groups: int, mx: bool) -> tuple[int, int]:
    return (-(-rows // 128) * 128, -(-groups // 4) * 4) if mx else (rows, groups)


def swizzled(scales: Tensor) -> Tensor:
    """Scales ``[rows, groups]`` filled up and in the order of the tensor cores, flat."""
    rows, groups = scales.shape
    whole = scales.new_zeros(_scale_shape(rows, groups, True))
    whole[:rows, :groups] = scales
    tiles = whole.shape[0] // 128, 4, 32, whole.shape[1] // 4, 4
    return whole.view(tiles).permute(0, 3, 2, 1, 4).reshape(-1)


def along_rows(x: Tensor, mx: bool) -> tuple[Tensor, Tensor]:
    (rows, N), G = x.shape, GROUP["mxfp8" if mx else "block"]
    groups = -(-N // G)
    x = torch.nn.functional.pad(x.float(), (0, groups * G - N)).view(rows, groups, G)
    most = x.abs().amax(-1)
    if mx:
        mantissa, exponent = torch.frexp(most / 448)
        exponent = torch.where(most == 0, -126, exponent - (mantissa == 0.5).int()).clamp(-126, 127)
        scaled = x * torch.ldexp(torch.ones(()), -exponent)[..., None]
        scales = torch.where(most.isnan(), 255, exponent + 127).to(torch.uint8)
    else:
        scales = torch.where(most == 0, 1.0, most / 448)
        scaled = x / scales[..., None]
    codes = scaled.to(torch.float8_e4m3fn).view(rows, groups * G)[:, :N].contiguous()
    return codes.view(torch.uint8), swizzled(scales) if mx else scales


def _reference(x: Tensor, mx: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *along_rows(x, mx), *along_rows(x.t(), mx)


def _kernels(x: Tensor, mx: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (R, N), G = x.shape, GROUP["mxfp8" if mx else "block"]
    codes, codes_t = x.new_empty(R, N, dtype=torch.uint8), x.new_empty(N, R, dtype=torch.uint8)
    scales = []
    for rows, groups in ((R, -(-N // G)), (N, -(-R // G))):
        shape = _scale_shape(rows, groups, mx)
        new = x.new_empty if shape == (rows, groups) else x.new_zeros
        scales.append(new(shape, dtype=torch.uint8 if mx else torch.float32))
    tile = 64 if mx else 128
    programs = -(-R // tile) * -(-N // tile)
    launch(
        quant_rowcol_kernel,
        programs,
        *(x.contiguous(), codes, scales[0], codes_t, scales[1], R, N),
        **{"G": G, "MX": mx, "TILE": tile, "num_warps": tile // 16},
    )
    first, second = (s.view(-1) if mx else s for s in scales)
    return codes, first, codes_t, second


_quant_rowcol = operator("quant_rowcol(Tensor x, bool mx) -> (Tensor, Tensor, Tensor, Tensor)", _reference, _kernels)


@dataclass(frozen=True)
class Quantised:
    """Codes and scales along one direction."""

    codes: Tensor
    """``float8_e4m3fn``."""
    scales: Tensor
    """fp32 ``[rows, groups]``, or ``float8_e8m0fnu``, flat, in the order of the tensor cores."""


def quant_rowcol(x_RN: Tensor, format: Format) -> tuple[Quantised, Quantised]:
    """Quantise along rows, and the transpose along its rows.

    Args:
        x_RN: bf16, fp16 or fp32, finite; groups that hold NaN come out as NaN.
        format: "mxfp8" or "block".
    """
    codes, scales, codes_t, scales_t = _quant_rowcol(x_RN, format == "mxfp8")
    kind = torch.float8_e8m0fnu if format == "mxfp8" else torch.float32
    return tuple(
        Quantised(q.view(torch.float8_e4m3fn), s.view(kind)) for q, s in ((codes, scales), (codes_t, scales_t))
    )
