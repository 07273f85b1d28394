"""A step that passed the bound on received rows (``moe.recv_capacity_factor``) runs again without it.

What the first run left behind is undone: gradients, counters and losses of the balance, the largest logits that QK-clip
has seen, and the state of the random number generators. Parameters, optimizer, expert bias and data have not moved
yet. So the second run is the step of a run that never had a bound.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_moe.checkpoint import restore_rng, rng_tensors
from titan_moe.moe.balance import balances
from titan_moe.moe.bound import bounded_dispatchers, take_overflow, unbounded
from titan_moe.optim import Optimizer


class Rerun:
    """Of one rank's model.

    Args:
        model: all that runs on this rank; it may have no bounded layer where other ranks have some.
        optimizer: of it.
        device: where flags are read.
        bounded: whether there is a bound on any rank; without one nothing here costs anything.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device, bounded: bool) -> None:
        self.model, self.optimizer, self.device, self.bounded = model, optimizer, device, bounded
        self.dispatchers = bounded_dispatchers(model)
        self._rng: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before the forward passes of a step."""
        if self.bounded:
            self._rng = rng_tensors()

    def overflow(self) -> Tensor:
        """0-d bool, after the backward passes: whether this rank passed a bound. No host sync."""
        return take_overflow(self.dispatchers, self.device)

    @contextmanager
    def without_bound(self) -> Iterator[None]:
        """Undo what was done since ``begin``; within, there is no bound. All ranks do so together."""
        restore_rng(self._rng)
        self.optimizer.zero_grad()
        if self.optimizer.clip is not None:
            self.optimizer.clip.forget()
        for _, _, balance in balances(self.model):
            balance.reset()
        with unbounded(self.dispatchers):
            yield
