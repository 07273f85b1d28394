"""Rotary position embedding, with YaRN scaling and partial or interleaved rotation.

Tables are computed in each forward pass, once for all layers: nothing to go stale after ``to_empty`` or
``.to(dtype)``, and cheap beside one layer.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_moe.models.spec import BETA_FAST, BETA_SLOW


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the context, 0.1 m ln(factor) + 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(scaling: dict[str, Any] | None) -> float:
    """Factor on cos and sin, hence squared on attention logits."""
    if scaling is None:
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, mscale_all = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return yarn_mscale(factor)


def inverse_frequencies(
    dim: int, theta: float, scaling: dict[str, Any] | None, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Radians per position of each rotated pair, ``[dim / 2]``.

    YaRN keeps the dims that turn more than beta_fast times within the original context, slows those that turn
    less than beta_slow times by ``factor``, and blends linearly in between (arXiv 2309.00071, section 3.2).
    """
    freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim))
    if scaling is None:
        return freq

    def dim_of(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or BETA_FAST), dim_of(scaling.get("beta_slow") or BETA_SLOW)
    if scaling.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(dim // 2, dtype=dtype, device=device) - low) / (high - low)).clamp(0, 1)
    return freq / scaling["factor"] * slowed + freq * (1 - slowed)


@dataclass(frozen=True)
class Rotary:
    """How queries and keys turn with their position.

    Dims ``[start, start + dim)`` of a head rotate, the rest pass through. A pair is (i, i + dim/2), or
    (2i, 2i + 1) when interleaved.
    """

    dim: int
    theta: float
    scaling: dict[str, Any] | None = None
    head_dim: int | None = None
    """Dims of a head, by default all rotated."""
    start: int = 0
    interleaved: bool = False

    def tables(self, positions_S: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos ``[S, 1, head_dim]``, 1 where dims pass through, and sin ``[S, 1, dim / 2]``, in ``dtype``."""
        freq = inverse_frequencies(self.dim, self.theta, self.scaling, device=positions_S.device, dtype=dtype)
        angle = positions_S.to(dtype)[:, None] * freq
        factor = attention_factor(self.scaling)
        cos, sin = angle.cos() * factor, angle.sin() * factor
        cos = cos.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((cos, cos), dim=-1)
        end = (self.head_dim or self.dim) - self.start - self.dim
        cos = torch.nn.functional.pad(cos, (self.start, end), value=1.0)
        return cos[:, None], sin[:, None]


class _Rotate(torch.autograd.Function):
    # Three kernels and no saved activation; the plain expression makes about ten temporaries.
    @staticmethod
    def forward(ctx, x, cos, sin, start, interleaved, inverse):
        ctx.save_for_backward(cos, sin)
        ctx.args = (start, interleaved, not inverse)
        dim = 2 * sin.shape[-1]
        out = x * cos

        def pairs(t: Tensor) -> tuple[Tensor, Tensor]:
            t = t[..., start : start + dim]
            return (t[..., ::2], t[..., 1::2]) if interleaved else (t[..., : dim // 2], t[..., dim // 2 :])

        first, second = pairs(x)
        out_first, out_second = pairs(out)
        sign = -1 if inverse else 1
        out_first.addcmul_(second, sin, value=-sign)
        out_second.addcmul_(first, sin, value=sign)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return _Rotate.apply(grad, *ctx.saved_tensors, *ctx.args), None, None, None, None, None


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor, *, start: int = 0, interleaved: bool = False) -> Tensor:
    """Rotates ``x_BSHD`` by the tables of ``Rotary.tables``; computed in the tables' dtype, returned in x's."""
    return _Rotate.apply(x_BSHD, cos, sin, start, interleaved, False)
