"""Launching kernels, and how large their blocks are.

Block sizes come from a table for each architecture, never from tuning at run time: a run would otherwise depend on
what else the device did while it tuned. ``audit`` compiles every entry.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Block:
    """Rows, columns and depth of a program's block, in elements, and how it runs."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @property
    def meta(self) -> dict[str, int]:
        """What a launch passes on of it."""
        return {"BM": self.m, "BN": self.n, "BK": self.k, "num_warps": self.warps, "num_stages": self.stages}


# m is the same for every product over groups of rows: they share one list of tiles.
_SM80 = {
    "gather_up": Block(128, 64, 32, 8, 3),
    "rows": Block(128, 128, 32, 8, 3),
    "down_dgrad": Block(128, 64, 32, 8, 3),
    "down_dgrad_heavy": Block(128, 32, 32, 8, 3),
    "wgrad": Block(128, 128, 32, 8, 3),
}
_SM90 = {
    "gather_up": Block(128, 64, 64, 8, 3),
    "rows": Block(128, 256, 64, 8, 3),
    "down_dgrad": Block(128, 64, 64, 8, 3),
    "down_dgrad_heavy": Block(128, 32, 64, 8, 3),
    "wgrad": Block(128, 256, 64, 8, 3),
}
# Small enough that every loop and every edge shows in small tests.
_INTERPRETER = {name: Block(16, 16, 16, 4, 1) for name in _SM90}
BLOCKS: dict[str, dict[str, Block]] = {"sm_80": _SM80, "sm_90": _SM90, "sm_100": _SM90, "interpreter": _INTERPRETER}


_assumed: str | None = None


def architecture(device: torch.device) -> str:
    """Key of ``BLOCKS`` for a device: the newest entry that it can run."""
    if _assumed is not None:
        return _assumed
    if device.type != "cuda":
        return "interpreter"
    if not torch.cuda.is_available():  # a fake tensor
        return "sm_90"
    return _cuda_architecture(device.index or 0)


@contextmanager
def assumed(arch: str) -> Iterator[None]:
    """Take every device for ``arch``: for fake tensors, on a machine without such a device."""
    global _assumed
    before, _assumed = _assumed, arch
    try:
        yield
    finally:
        _assumed = before


@lru_cache
def _cuda_architecture(index: int) -> str:
    major, _ = torch.cuda.get_device_capability(index)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


def block(name: str, tensor: Tensor) -> Block:
    """The block of a kernel for a tensor's device and dtype."""
    arch = architecture(tensor.device)
    return sized(BLOCKS[arch][name], tensor.element_size() if arch != "interpreter" else 2)


def sized(block: Block, element_size: int) -> Block:
    """The entry for elements of 2 bytes, cut so that wider ones take no more shared memory or registers."""
    return block if element_size <= 2 else Block(block.m, min(block.n, 32), 16, block.warps, 2)


def tile_rows(device: torch.device) -> int:
    """Rows of a tile of the products over groups of rows."""
    return BLOCKS[architecture(device)]["rows"].m


Observer = Callable[[Any, int, tuple, dict[str, Any]], None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call ``observer(kernel, programs, args, meta)`` at every launch."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def launch(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
    """Run ``programs`` programs of a kernel; none for 0. The launch is observed for tensors without data too."""
    if programs == 0:
        return
    for observer in _observers:
        observer(kernel, programs, args, meta)
    if not any(without_data(arg) for arg in args):
        kernel[(programs,)](*args, **meta)


def without_data(value: Any) -> bool:
    """Whether it is a tensor on which nothing runs: fake, or on meta."""
    return isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor))
