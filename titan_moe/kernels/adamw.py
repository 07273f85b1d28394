"""One AdamW step of a parameter in one pass, on state in any of its storages.

Reads the gradient, and reads and writes the parameter, its moments with their scales and its master or remainder: for
bfloat16 moments on an fp32 parameter 4 + 2 * (4 + 2 + 2) = 20 bytes an element, where separate conversions move more
than twice that. Nothing is allocated. The torch counterpart is ``titan_moe.optim.adamw``, whose rounding by chance is
bit for bit the same.
"""

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from titan_moe.kernels.language import rounded, tl, triton
from titan_moe.kernels.launch import launch

BLOCK = 32
"""Elements of the last dim that share a scale."""
_BLOCKS = 32
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Stored:
    """A state of a parameter, in place.

    Args:
        data: of the parameter's shape: float32 or bfloat16, or float16 or float8_e4m3fn with ``scale``.
        scale: powers of two, bfloat16 ``[..., blocks]``.
        seed: of its random numbers, where it is rounded by chance.
    """

    data: Tensor
    scale: Tensor | None
    seed: int


@dataclass(frozen=True)
class Hyper:
    """Of one step.

    Args:
        step: counted from 1.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled.
    """

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@triton.jit
def _mix(x):
    """A bijection of 32-bit words."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(place, key):
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    high = (place >> 32).to(tl.uint32)
    bits = _mix(low ^ _mix(high ^ key.to(tl.uint32)))
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _to_unit(x, chance, MANTISSA: tl.constexpr, LEAST: tl.constexpr, BY_CHANCE: tl.constexpr):
    """``x`` with ``MANTISSA`` bits, still in fp32: to nearest even, or by chance."""
    exponent = (x.to(tl.uint32, bitcast=True) >> 23) & 0xFF
    exponent = tl.maximum(exponent.to(tl.int32), LEAST + 127)
    unit = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)
    # Powers of two: exact, where a division would be approximate.
    y = tl.abs(x) * ((254 - exponent + MANTISSA) << 23).to(tl.float32, bitcast=True)
    if BY_CHANCE:
        y = tl.floor(y + chance)
    else:
        # Beyond 2**23 the sum has no fraction: adding and taking away rounds to even.
        y = (y + 12582912.0) - 12582912.0
    return tl.where(x < 0, -y * unit, y * unit)


@triton.jit
def _store(at, values, chance, inside, BY_CHANCE: tl.constexpr):
    if BY_CHANCE and at.dtype.element_ty == tl.bfloat16:
        values = _to_unit(values, chance, 7, -119, True)
    tl.store(at, rounded(values, at.dtype.element_ty), inside)


@triton.jit
def _load_scaled(data, scale, at, block, inside, used, SCALED: tl.constexpr, SQUARE: tl.constexpr):
    x = tl.load(data + at, inside, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(scale + block, used, other=0.0).to(tl.float32)[:, None]
        if SQUARE:
            x = x * x
    return x


@triton.jit
def _store_scaled(
    data,
    scale,
    at,
    block,
    x,
    chance,
    inside,
    used,
    SCALED: tl.constexpr,
    SQUARE: tl.constexpr,
    BY_CHANCE: tl.constexpr,
):
    if SCALED:
        HALF: tl.constexpr = data.dtype.element_ty == tl.float16
        MANTISSA: tl.constexpr = 10 if HALF else 3
        LEAST: tl.constexpr = -14 if HALF else -6
        TOP: tl.constexpr = 15 if HALF else 8
        if SQUARE:
            x = tl.sqrt(x)
        largest = tl.max(tl.where(inside, tl.abs(x), 0.0), 1)
        # The exponent e of frexp: largest = m * 2**e with m in [1/2, 1); 0 for 0.
        exponent = ((largest.to(tl.uint32, bitcast=True) >> 23) & 0xFF).to(tl.int32) - 126
        exponent = tl.maximum(tl.where(largest == 0, 0, exponent), -100)
        power = ((exponent - TOP + 127) << 23).to(tl.float32, bitcast=True)
        inverse = ((TOP - exponent + 127) << 23).to(tl.float32, bitcast=True)
        x = x * inverse[:, None]
        if SQUARE:
            x = tl.where(x > 0, tl.maximum(x, 5.9604644775390625e-08 if HALF else 0.001953125), x)
        x = _to_unit(x, chance, MANTISSA, LEAST, BY_CHANCE)
        tl.store(data + at, x.to(data.dtype.element_ty), inside)
        tl.store(scale + block, power.to(tl.bfloat16), used)
    else:
        _store(data + at, x, chance, inside, BY_CHANCE)


# Keys change with each step: no variant of the kernel for those that happen to be multiples of 16.
@triton.jit(do_not_specialize=["first_key", "second_key", "parameter_key"])
def _adamw_kernel(
    parameter,
    grad,
    first,
    first_scale,
    second,
    second_scale,
    master,
    remainder,
    row_places,
    rows,
    n,
    first_key,
    second_key,
    parameter_key,
    decay,
    beta1,
    beta2,
    step_size,
    correction,
    eps,
    FIRST_SCALED: tl.constexpr,
    SECOND_SCALED: tl.constexpr,
    MASTER: tl.constexpr,
    REMAINDER: tl.constexpr,
    BY_CHANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    in_row = tl.cdiv(n, BLOCK)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // in_row
    column = ((block % in_row) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    used = row < rows
    inside = used[:, None] & (column < n)
    at = row[:, None] * n + column

    if REMAINDER:
        upper = tl.load(parameter + at, inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(remainder + at, inside, other=0).to(tl.int32)
        value = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    elif MASTER:
        value = tl.load(master + at, inside, other=0.0)
    else:
        value = tl.load(parameter + at, inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    m = _load_scaled(first, first_scale, at, block, inside, used, FIRST_SCALED, False)
    v = _load_scaled(second, second_scale, at, block, inside, used, SECOND_SCALED, True)

    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * (g * g)
    value = value * decay - step_size * m / (tl.sqrt(v) / correction + eps)

    first_chance = 0.0
    second_chance = 0.0
    chance = 0.0
    if BY_CHANCE:
        place = tl.load(row_places + row, used, other=0)[:, None] + column
        first_chance = _uniform(place, first_key)
        second_chance = _uniform(place, second_key)
        chance = _uniform(place, parameter_key)
    _store_scaled(first, first_scale, at, block, m, first_chance, inside, used, FIRST_SCALED, False, BY_CHANCE)
    _store_scaled(second, second_scale, at, block, v, second_chance, inside, used, SECOND_SCALED, True, BY_CHANCE)
    if REMAINDER or MASTER:
        bits = value.to(tl.int32, bitcast=True)
        # Ties away from zero, so that the lower half tells which way it was rounded.
        upper = ((bits + 0x8000) >> 16).to(tl.int16)
        tl.store(parameter + at, upper.to(tl.bfloat16, bitcast=True), inside)
        if REMAINDER:
            tl.store(remainder + at, bits.to(tl.int16), inside)
        else:
            tl.store(master + at, value, inside)
    else:
        _store(parameter + at, value, chance, inside, BY_CHANCE)


def fused_adamw(
    parameter: Tensor,
    grad: Tensor,
    first: Stored,
    second: Stored,
    hyper: Hyper,
    *,
    master: Tensor | None = None,
    remainder: Tensor | None = None,
    row_places: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Update a parameter and its state in place, in fp32.

    Args:
        parameter: contiguous ``[..., n]``, float32 or bfloat16; with a master or remainder bfloat16.
        grad: of its shape.
        first: the mean of gradients.
        second: the mean of their squares; scaled ones hold square roots.
        hyper: of the step.
        master: fp32 of its shape.
        remainder: int16 of its shape.
        row_places: int64, for rounding by chance: where each row ``[n]`` begins in the flattened whole tensor.
        seed: of the parameter's own rounding.
    """
    n = parameter.shape[-1] if parameter.ndim else 1
    rows = parameter.numel() // n
    programs = -(-rows * -(-n // BLOCK) // _BLOCKS)
    by_chance = row_places is not None
    launch(
        _adamw_kernel,
        programs,
        *(parameter, grad.contiguous(), first.data, first.scale, second.data, second.scale, master, remainder),
        *(row_places, rows, n),
        *(_key(hyper.step, s) for s in (first.seed, second.seed, seed)),
        1 - hyper.lr * hyper.weight_decay,
        hyper.beta1,
        hyper.beta2,
        hyper.lr / (1 - hyper.beta1**hyper.step),
        sqrt(1 - hyper.beta2**hyper.step),
        hyper.eps,
        FIRST_SCALED=first.scale is not None,
        SECOND_SCALED=second.scale is not None,
        MASTER=master is not None,
        REMAINDER=remainder is not None,
        BY_CHANCE=by_chance,
        BLOCK=BLOCK,
        BLOCKS=_BLOCKS,
        num_warps=4,
    )


def _key(step: int, seed: int) -> int:
    """What ``_uniform`` wants to know of a step and a seed, in the lower half of an integer that always has 64 bits."""
    return _mix_word(_mix_word(step & _WORD) ^ seed) | 1 << 40


def _mix_word(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _WORD
    x ^= x >> 15
    x = x * 0x846CA68B & _WORD
    return x ^ (x >> 16)
