"""How optimizer state is kept between steps, apart from the precision it is computed in.

float64, float32 and bfloat16 are kept as they are. float16 and float8 (e4m3) come with one power of two for every
``BLOCK`` elements along the last dim, so that the largest of a block uses the format's range. Blocks belong to the
whole tensor and never cross shards, so a state does not depend on the layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.errors import ConfigError
from titan_moe.optim.parts import assembled, zeros_like
from titan_moe.optim.rounding import BFLOAT16, FLOAT8, FLOAT16, Format, round_by_chance

BLOCK = 32
"""Elements that share a scale."""

_FORMATS = {"float16": FLOAT16, "float8": FLOAT8}
# Scales are normal bfloat16 numbers, and so are their inverses.
_LEAST_EXPONENT = -100

Chance = Callable[[], Tensor] | None
"""Gives uniform numbers in [0, 1) for the elements at hand; None where rounding is to nearest."""


@dataclass(frozen=True)
class Storage:
    """One kind of state and how its elements are stored.

    Args:
        name: key in the optimizer's state; scales are at ``<name>_scale``.
        dtype: of elements that are stored as they are.
        scaled: their format where they come with scales.
        square: values are never negative and their square roots are stored. That halves the range of exponents. What
            is not zero stays above zero, since a step divides by it.
    """

    name: str
    dtype: torch.dtype
    scaled: Format | None = None
    square: bool = False

    @property
    def bytes_per_element(self) -> float:
        """Scales included."""
        return self.scaled.dtype.itemsize + 2 / BLOCK if self.scaled else self.dtype.itemsize

    def new(self, parameter: Tensor) -> dict[str, Tensor]:
        """Zeros for a parameter, laid out as it is.

        Raises:
            ConfigError: shards of the parameter would cut a block.
        """
        dtype = self.scaled.dtype if self.scaled else self.dtype
        state = {self.name: zeros_like(parameter, dtype)}
        if self.scaled:
            state[f"{self.name}_scale"] = _new_scales(parameter)
        return state

    def read(self, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The values in ``dtype``, from plain tensors. What is stored in ``dtype`` is not copied."""
        if self.scaled is None:
            return state[self.name].to(dtype)
        values = _times(state[self.name].to(dtype), state[f"{self.name}_scale"].to(dtype))
        return values.square_() if self.square else values

    def write(self, state: Mapping[str, Tensor], values: Tensor, chance: Chance = None) -> None:
        """Store ``values``; those that ``read`` did not copy are there already."""
        target = state[self.name]
        if self.scaled is None:
            if target is not values:
                target.copy_(rounded(values, target.dtype, chance))
            return
        values = values.sqrt() if self.square else values
        scale = _scales_of(values, self.scaled.top)
        values = _times(values, scale.reciprocal()).float()
        if self.square:
            least = 2.0 ** (self.scaled.least - self.scaled.mantissa)
            values = torch.where(values > 0, values.clamp(min=least), values)
        target.copy_(values.to(self.scaled.dtype) if chance is None else round_by_chance(values, self.scaled, chance()))
        state[f"{self.name}_scale"].copy_(scale)


def storage_for(name: str, dtype: str | None, parameter: Tensor, *, square: bool = False) -> Storage:
    """The storage of a state of ``parameter``.

    Args:
        name: of the state.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float8``; None: that of the computation. Parameters of fewer
            than two dims, which no memory is spent on, keep that of the computation instead of blocks.
        parameter: whose state it is.
        square: see ``Storage``.
    """
    compute = compute_dtype(parameter)
    if dtype in _FORMATS and parameter.ndim > 1:
        return Storage(name, compute, _FORMATS[dtype], square)
    plain = compute if dtype is None or dtype in _FORMATS else getattr(torch, dtype)
    return Storage(name, plain)


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """What a parameter's update is computed in: at least fp32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def rounded(values: Tensor, dtype: torch.dtype, chance: Chance) -> Tensor:
    """``values`` in ``dtype``: by chance where that is bfloat16 and a chance is given, else to nearest."""
    if dtype == torch.bfloat16 and values.dtype != dtype and chance is not None:
        return round_by_chance(values.float(), BFLOAT16, chance())
    return values.to(dtype)


def _scales_of(values: Tensor, top: int) -> Tensor:
    """Powers of two ``[..., blocks]`` by which the largest of each block lies under ``2**top``."""
    short = -values.shape[-1] % BLOCK
    largest = F.pad(values.abs(), (0, short)).unflatten(-1, (-1, BLOCK)).amax(-1)
    exponent = torch.frexp(largest).exponent.clamp_(min=_LEAST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent - top)


def _times(values: Tensor, scale: Tensor) -> Tensor:
    return values * scale.repeat_interleave(BLOCK, dim=-1)[..., : values.shape[-1]]


def _new_scales(parameter: Tensor) -> Tensor:
    shape = (*parameter.shape[:-1], -(-parameter.shape[-1] // BLOCK))
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=torch.bfloat16, device=parameter.device)
    mesh, last = parameter.device_mesh, parameter.shape[-1]
    for size, placement in zip(mesh.shape, parameter.placements, strict=True):
        if size > 1 and getattr(placement, "dim", None) == parameter.ndim - 1:
            last = -(-last // size)
            if last % BLOCK:
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} is cut into pieces of {last} along its last dim: "
                    f"optimizer state in float16 or float8 has one scale for {BLOCK} elements, which must stay "
                    "together. Choose bfloat16, or degrees that leave a multiple."
                )
    local = parameter.to_local()
    sizes = (*local.shape[:-1], -(-local.shape[-1] // BLOCK)) if local.numel() else (0,) * len(shape)
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    part = torch.zeros(sizes, dtype=torch.bfloat16, device=local.device)
    return assembled(part, parameter, torch.Size(shape), tuple(stride))
