"""The routing decision, as it passes from router to capacity to dispatcher."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Routing:
    """Which experts each token goes to.

    Slots without an expert hold id -1 and weight 0. K is ``top_k``, or E where a token's number of experts
    varies (expert choice, padded counts); ``max_rows`` then bounds the number of slots in use.
    """

    expert_ids_TK: Tensor
    """Int64 or int32, in [-1, E)."""
    weights_TK: Tensor
    """At least fp32, with gradient."""
    counts: Tensor
    """Integer: slots in use per expert ``[E]``, or of each block of tokens ``[N, E]`` as ``route_map`` takes them."""
    max_rows: int
    """Static upper bound on ``counts_E.sum()``; at most T*K."""
    num_sequences: int = 1
    """Sequences, none of which shares a block with another."""

    @property
    def counts_E(self) -> Tensor:
        """Int64: slots in use per expert, ``(expert_ids_TK == e).sum()``."""
        return self.counts if self.counts.dim() == 1 else self.counts.sum(0)


def count_experts(ids: Tensor, num_experts: int) -> Tensor:
    """Slots per expert, without a host sync.

    Args:
        ids: integers of any shape, in [-1, num_experts); -1 counts nowhere.
        num_experts: E.

    Returns:
        Int64 ``[E]``.
    """
    slots = ids.reshape(-1).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    # -1 wraps to the spare last bin.
    return counts.scatter_add_(0, slots % (num_experts + 1), torch.ones_like(slots))[:num_experts]
