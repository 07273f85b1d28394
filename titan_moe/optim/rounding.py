"""Rounding to fewer bits: to nearest, or up or down by chance so that the mean is exact.

The chance is a hash of a tensor's name, its step and the element's place in the whole tensor. So a run repeats bit
for bit, after a resume too, and under any layout.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A floating-point format of fewer bits than fp32."""

    dtype: torch.dtype
    mantissa: int
    """Stored mantissa bits."""
    least: int
    """Exponent of the smallest normal number."""
    top: int
    """Scaled values stay below two to this."""


# The whole binade under the top is finite in its format. bfloat16 could go to -126; seven binades are kept, so
# that the unit in the last place is a normal number too.
BFLOAT16 = Format(torch.bfloat16, 7, -119, 127)
FLOAT16 = Format(torch.float16, 10, -14, 15)
FLOAT8 = Format(torch.float8_e4m3fn, 3, -6, 8)


def seed_of(name: str) -> int:
    """A parameter's own 31-bit seed."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


def places(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Index of each element of the box ``[offsets, offsets + sizes)`` in the flattened tensor of ``shape``, int64."""
    index, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in range(len(shape) - 1, -1, -1):
        own = torch.arange(offsets[dim], offsets[dim] + sizes[dim], device=device) * stride
        index = index + own.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return index


def uniform(places: Tensor, seed: int, step: Tensor) -> Tensor:
    """A float32 in [0, 1) for each place: 24 bits of a 32-bit hash of (seed, step, place).

    Args:
        places: int64, see ``places``.
        seed: less than 2**31.
        step: 0-d, a whole number.
    """
    key = _mix((_mix(step.to(device=places.device, dtype=torch.int64) & _WORD) ^ seed) & _WORD)
    bits = _mix((places & _WORD) ^ _mix((places >> 32) ^ key))
    return (bits >> 8).to(torch.float32) * 2.0**-24


_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, held in int64, in which every bit depends on every other."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def round_by_chance(x: Tensor, form: Format, chance: Tensor) -> Tensor:
    """``x`` in ``form``'s dtype: of its two neighbours there the upper one in magnitude where ``chance`` says so.

    The expected value is ``x``. Magnitudes must be finite in the format.

    Args:
        x: float32.
        form: what to round to.
        chance: uniform in [0, 1), of x's shape.
    """
    exponent = ((x.view(torch.int32) >> 23) & 0xFF).clamp_(min=form.least + 127)
    # The distance of neighbours, a power of two.
    unit = ((exponent - form.mantissa) << 23).view(torch.float32)
    return (x.abs().div_(unit).add_(chance).floor_().mul_(unit)).copysign_(x).to(form.dtype)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as bfloat16 and the 16 bits below it, int16; the first is the nearest bfloat16, ties away from zero.

    Ties to even could not be undone: the bits below would not say which way a tie went.
    """
    bits = master.view(torch.int32)
    rounded = (bits + 0x8000) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_master(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 that ``split_master`` split."""
    # The lower half, taken as signed, is what rounding removed.
    return ((upper.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)).view(torch.float32)
