"""Triton, and the device functions that all kernels share.

Kernels live beside their torch reference, so their modules must load where there is no Triton: its decorators and
annotations are stand-ins there, and ``backend`` never picks the kernels.
"""

import importlib.util
from types import SimpleNamespace

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

    INTERPRETED = bool(triton.knobs.runtime.interpret)
else:
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=lambda value: value)
    INTERPRETED = False

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in the accumulator's precision. The interpreter has no half-precision products."""
    if _INTERPRETED:
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """``x`` in ``dtype``, to nearest even. The interpreter's own cast to bfloat16 truncates."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        # Adding to the bits of a NaN could carry into the sign.
        bits = tl.where(x == x, even, bits | 0x10000) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(dtype)
