"""The bound on received rows over a whole model: whether a step passed it, and running without it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_moe.moe.dispatch import GroupDispatcher
from titan_moe.moe.layer import MoE


def bounded_dispatchers(model: nn.Module) -> list[GroupDispatcher]:
    """Those of the model's layers that have a bound."""
    found = [layer.dispatcher for layer in model.modules() if isinstance(layer, MoE)]
    return [d for d in found if isinstance(d, GroupDispatcher) and d.recv_capacity_factor is not None]


def take_overflow(dispatchers: list[GroupDispatcher], device: torch.device) -> Tensor:
    """0-d bool on ``device``: whether any bound was passed since this was last asked, on this rank. No host sync."""
    flags = [d.overflow for d in dispatchers if d.overflow is not None]
    for dispatcher in dispatchers:
        dispatcher.overflow = None
    return torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool, device=device)


@contextmanager
def unbounded(dispatchers: list[GroupDispatcher]) -> Iterator[None]:
    """Dispatchers as without a bound, within."""
    factors = [d.recv_capacity_factor for d in dispatchers]
    for dispatcher in dispatchers:
        dispatcher.recv_capacity_factor = None
    try:
        yield
    finally:
        for dispatcher, factor in zip(dispatchers, factors, strict=True):
            dispatcher.recv_capacity_factor = factor
