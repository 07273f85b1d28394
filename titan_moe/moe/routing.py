"""The routing decision, as it passes from router to capacity to dispatcher."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Routing:
    """Which experts each token goes to.

    Slots without an expert hold id -1 and weight 0. K is ``top_k``, or E where a token's number of experts
    varies (expert choice, padded counts); ``max_rows`` then bounds the number of slots in use.
    """

    expert_ids_TK: Tensor
    """Int64, in [-1, E)."""
    weights_TK: Tensor
    """At least fp32, with gradient."""
    counts_E: Tensor
    """Int64: slots in use per expert, ``(expert_ids_TK == e).sum()``."""
    max_rows: int
    """Static upper bound on ``counts_E.sum()``; at most T*K."""
