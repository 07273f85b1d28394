"""The interface of dispatchers: how tokens reach their experts and come back.

Six stages, so that a scheduler can put other work between them. The three of the way out take what the stage before
returned; those of the way back take the experts' output and the same ``Dispatched``.

Experts may be spread over a group of ``ep x etp`` ranks, etp fastest: ep rank r holds the experts ``expert_range``
gives it, and its etp ranks hold slices of those experts' hidden dim, so that their outputs are partial sums.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_moe.kernels.route_map import RouteMap
from titan_moe.moe.routing import Routing


def expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """First expert of an ep rank and the one past its last; as DTensor and ``torch.chunk`` cut, the last ranks less.

    For 5 experts over 4 ranks: 2, 2, 1, 0.
    """
    chunk = -(-num_experts // ep_size)
    return min(ep_rank * chunk, num_experts), min((ep_rank + 1) * chunk, num_experts)


@dataclass
class Dispatched:
    """What the experts of this rank compute on, and what the way back needs.

    Complete after the third stage: the rows of the experts here are then ``x`` gathered by ``route_map``, and
    ``weights`` and ``counts_E`` describe them. Between the stages ``x`` and ``weights`` are what travels next.
    """

    x: Tensor
    """``[T, D]`` tokens, or rows that have arrived."""
    weights: Tensor
    """Routing weight of each slot of ``route_map``, or without one of each row; fp32 or wider, with gradient."""
    counts_E: Tensor | None
    """Int64: rows of each expert of this rank; may be None with a ``route_map``, whose offsets say it."""
    route_map: RouteMap | None
    state: Any = None
    """The dispatcher's own."""


class Dispatcher(ABC):
    """Holds no parameters.

    Attributes:
        host_syncs: how often one dispatch waits for the device to read sizes; combine and backward never do.
    """

    host_syncs: int

    @abstractmethod
    def dispatch_preprocess(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Work before tokens travel: order, counts, split sizes."""

    @abstractmethod
    def token_dispatch(self, dispatched: Dispatched) -> Dispatched:
        """Tokens and weights travel to the ranks of their experts."""

    @abstractmethod
    def dispatch_postprocess(self, dispatched: Dispatched) -> Dispatched:
        """Order what arrived by local expert."""

    @abstractmethod
    def combine_preprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Order the experts' output by where it goes. With a ``route_map`` the experts have done so already."""

    @abstractmethod
    def token_combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Rows travel back."""

    @abstractmethod
    def combine_postprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the rows of each token: ``[T, D]``."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """The three stages of the way out."""
        return self.dispatch_postprocess(self.token_dispatch(self.dispatch_preprocess(x_TD, routing)))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """The three stages of the way back."""
        y = self.combine_preprocess(y, dispatched)
        return self.combine_postprocess(self.token_combine(y, dispatched), dispatched)


class GroupDispatcher(Dispatcher):
    """Experts spread over the ranks of a group.

    With a *bound* on what is received, every shape follows from this rank's number of tokens, which must be that of
    all ranks of the group in every call, and the host waits for nothing. What exceeds the bound raises a flag on the
    device, and this rank's slots, or its experts' rows, then count for nothing: the caller has to look at the flag and
    do its work again without the bound (``titan_moe.moe.bound``).

    Attributes:
        group: the flattened (ep, etp) group, etp fastest.
        ep_size, etp_size: their product is the group's size.
        first, last: the experts here are ``range(first, last)``.
        recv_capacity_factor: the bound: rows received over those of even routing; None: as many as there are.
        overflow: 0-d bool, whether the bound was passed since it was last set to None; None: it was not met.
    """

    syncs_without_bound: int
    """``host_syncs`` where there is no bound."""

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        etp_size: int = 1,
        recv_capacity_factor: float | None = None,
    ):
        size = dist.get_world_size(group)
        assert size % etp_size == 0, (size, etp_size)
        self.num_experts, self.group, self.etp_size = num_experts, group, etp_size
        self.ep_size = size // etp_size
        self.first, self.last = expert_range(num_experts, self.ep_size, dist.get_rank(group) // etp_size)
        self.recv_capacity_factor = recv_capacity_factor
        self.overflow: Tensor | None = None

    @property
    def host_syncs(self) -> int:
        return self.syncs_without_bound if self.recv_capacity_factor is None else 0

    @property
    def chunk(self) -> int:
        """Most experts of any rank."""
        return -(-self.num_experts // self.ep_size)

    def by_rank(self, counts_E: Tensor) -> Tensor:
        """Counts for each expert of each ep rank, ``[ep, chunk]``, filled up to equally many experts."""
        return F.pad(counts_E, (0, self.ep_size * self.chunk - self.num_experts)).view(self.ep_size, self.chunk)

    def bound_on(self, rows: int, most: int) -> int:
        """The bound for one rank's share of ``rows`` rows, and at most ``most``."""
        factor = Fraction(self.recv_capacity_factor).limit_denominator(10**6)
        return min(math.ceil(factor * rows * self.chunk / self.num_experts), most)

    def within(self, fits: Tensor, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and counts as they are, or none where they do not fit (0-d bool), which is remembered."""
        over = fits.logical_not()
        self.overflow = over if self.overflow is None else self.overflow.logical_or(over)
        return torch.where(fits, ids, -1), torch.where(fits, counts, 0)
