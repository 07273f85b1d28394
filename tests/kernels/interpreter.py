"""Running Triton kernels without a GPU: the interpreter, its grid in any order, and both backends side by side."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton.runtime import interpreter

from titan_moe.kernels.backend import set_backend

ORDERS = ("forward", "reversed", "shuffled")


@contextmanager
def backend(name: str) -> Iterator[None]:
    before = set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


@contextmanager
def grid_order(order: str) -> Iterator[None]:
    """Run the programs of every launch in this order; a race between programs gives other results."""
    builder = interpreter.interpreter_builder
    plain = type(builder).set_grid_idx
    orders: dict[int, list[int]] = {}

    def set_grid_idx(x: int, y: int, z: int) -> None:
        n = builder.grid_dim[0]
        assert builder.grid_dim[1:] == (1, 1)
        if n not in orders:
            orders[n] = list(range(n))
            if order == "reversed":
                orders[n].reverse()
            elif order == "shuffled":
                random.Random(n).shuffle(orders[n])
        plain(builder, orders[n][x], y, z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_idx


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory of floating-point tensors holds NaN, of integer ones the largest value."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def by_triton(function, *args, **kwargs):
    """The kernels' result under poisoned memory, which must be bitwise the same for every order of the grid."""
    results = []
    for order in (*ORDERS, "forward"):
        with backend("triton"), grid_order(order), poisoned_memory():
            results.append(function(*args, **kwargs))
    for other in results[1:]:
        assert_same_bits(results[0], other)
    return results[0]


def assert_same_bits(a, b) -> None:
    if isinstance(a, torch.Tensor):
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        assert a.shape == b.shape and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_bits(a[key], b[key])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)
    else:
        assert a == b


def within_one_rounding(got: torch.Tensor, exact: torch.Tensor, slack: float = 0.0) -> None:
    """``got`` is one of the two neighbours of ``exact`` in its own dtype, or differs by less than ``slack``."""
    assert exact.dtype == torch.float64 and got.shape == exact.shape
    eps = torch.finfo(got.dtype).eps
    allowed = eps * exact.abs().clamp_min(torch.finfo(got.dtype).tiny) + slack
    error = (got.double() - exact).abs()
    assert bool((error <= allowed).all()), ((error - allowed).max(), got.dtype)
