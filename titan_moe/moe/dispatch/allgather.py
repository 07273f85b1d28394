"""Every rank sees the tokens of all ranks and computes its own experts' rows; outputs are summed back.

Sent per rank: T D elements to each other rank on the way out, with K ids and weights per token, and as much on the
way back. Less than an all-to-all where K is more than the number of ranks, and no rank waits for split sizes.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.kernels.route_map import route_map
from titan_moe.moe.dispatch.base import Dispatched, GroupDispatcher
from titan_moe.moe.dispatch.wire import all_gather, gather_ranks, sum_ranks
from titan_moe.moe.routing import Routing, count_experts


@dataclass
class _Way:
    ids_TK: Tensor
    """Global expert ids of this rank's tokens; after the way out, of all tokens."""
    tokens: int
    """Tokens here."""
    most_tokens: int
    """Most tokens of any rank: the others are filled up with tokens without experts."""
    max_rows: int
    """Bound on the rows of the experts here."""


class AllGatherDispatcher(GroupDispatcher):
    """Tokens, ids and weights of all ranks on every rank.

    By default one wait for the host per dispatch finds the most tokens of any rank and the exact number of rows. With
    ``equal_tokens`` there is none: all ranks must hold equally many tokens in every call, and buffers are sized for
    ``min(K, e)`` rows per token, e being the experts here; with a bound, at most for that.
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        etp_size: int = 1,
        recv_capacity_factor: float | None = None,
        equal_tokens: bool = False,
    ):
        super().__init__(num_experts, group, etp_size, recv_capacity_factor)
        self.equal_tokens = equal_tokens
        self.syncs_without_bound = 0 if equal_tokens else 1

    def dispatch_preprocess(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        T = x_TD.shape[0]
        size, most = dist.get_world_size(self.group), T
        if self.equal_tokens or self.recv_capacity_factor is not None:
            max_rows = size * min(T * (self.last - self.first), routing.max_rows)
            if self.recv_capacity_factor is not None:
                max_rows = self.bound_on(size * routing.max_rows, max_rows)
        else:
            mine = torch.cat([routing.counts_E, routing.counts_E.new_full((1,), T)])
            all_GE = all_gather(mine[None], 1, self.group)
            rows = all_GE[:, self.first : self.last].sum()
            most, max_rows = torch.stack([all_GE[:, -1].max(), rows]).tolist()  # the host sync
        return Dispatched(
            x_TD, routing.weights_TK, routing.counts_E, None, _Way(routing.expert_ids_TK, T, most, max_rows)
        )

    def token_dispatch(self, dispatched: Dispatched) -> Dispatched:
        way = dispatched.state
        ids_TK = all_gather(way.ids_TK.int(), way.most_tokens, self.group, fill=-1).long()
        x, weights_TK = gather_ranks(dispatched.x, dispatched.weights, rows=way.most_tokens, group=self.group)
        way = _Way(ids_TK, way.tokens, way.most_tokens, way.max_rows)
        return Dispatched(x, weights_TK, dispatched.counts_E, None, way)

    def dispatch_postprocess(self, dispatched: Dispatched) -> Dispatched:
        way, experts = dispatched.state, self.last - self.first
        ids_TK = way.ids_TK - self.first
        ids_TK = torch.where((ids_TK >= 0) & (ids_TK < experts), ids_TK, -1)
        counts_E = count_experts(ids_TK, experts)
        if self.recv_capacity_factor is not None:
            ids_TK, counts_E = self.within(counts_E.sum() <= way.max_rows, ids_TK, counts_E)
        map_ = route_map(ids_TK, counts_E, way.max_rows)
        return Dispatched(dispatched.x, dispatched.weights, counts_E, map_, way)

    def combine_preprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y

    def token_combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return sum_ranks(y, self.group)

    def combine_postprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y[: dispatched.state.tokens]
