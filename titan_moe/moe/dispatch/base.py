"""The interface of dispatchers: how tokens reach their experts and come back.

Six stages, so that a scheduler can put other work between them. The three of the way out take what the stage before
returned; those of the way back take the experts' output and the same ``Dispatched``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from titan_moe.kernels.route_map import RouteMap
from titan_moe.moe.routing import Routing


@dataclass
class Dispatched:
    """What the experts of this rank compute on, and what the way back needs.

    ``weights_R`` and ``counts_E`` describe the rows; the rows are ``x`` gathered by ``route_map``.
    """

    x: Tensor
    """``[T, D]`` tokens."""
    weights_R: Tensor
    """Routing weight of each row, fp32 or wider, with gradient."""
    counts_E: Tensor
    """Int64: rows of each expert."""
    route_map: RouteMap


class Dispatcher(ABC):
    """Holds no parameters."""

    @abstractmethod
    def dispatch_preprocess(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Local work before tokens travel: order, counts, split sizes."""

    @abstractmethod
    def token_dispatch(self, dispatched: Dispatched) -> Dispatched:
        """Tokens and weights travel to the ranks of their experts."""

    @abstractmethod
    def dispatch_postprocess(self, dispatched: Dispatched) -> Dispatched:
        """Order what arrived by local expert."""

    @abstractmethod
    def combine_preprocess(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Order the experts' output by where it goes."""

    @abstractmethod
    def token_combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Rows travel back."""

    @abstractmethod
    def combine_postprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the rows of each token: ``[T, D]``."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """The three stages of the way out."""
        return self.dispatch_postprocess(self.token_dispatch(self.dispatch_preprocess(x_TD, routing)))

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """The three stages of the way back."""
        y = self.combine_preprocess(y_RD, dispatched)
        return self.combine_postprocess(self.token_combine(y, dispatched), dispatched)
