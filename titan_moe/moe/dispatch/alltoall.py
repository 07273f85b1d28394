"""Each row travels to the ranks of its expert, and its output back, by one all-to-all each way.

Sent per rank and direction: a row of D elements for each of its T K slots, (ep - 1) / ep of them to other ranks when
routing is even, times etp; and one weight, fp32 or wider, per row on the way out. The order of rows at an expert is
(source rank, token), so results do not depend on timing.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.kernels.combine import combine
from titan_moe.kernels.route_map import RouteMap, offsets_of, route_map
from titan_moe.moe.dispatch.base import Dispatched, GroupDispatcher
from titan_moe.moe.dispatch.wire import gather_rows, swap
from titan_moe.moe.routing import Routing


@dataclass
class _Way:
    """Sizes and order of one dispatch; G ranks, e local experts, S rows sent."""

    send: list[int]
    """Rows to each rank."""
    receive: list[int]
    """Rows from each rank."""
    counts_Ge: Tensor
    """Int64: rows from each rank for each expert here."""
    home: RouteMap
    """The sent rows, with the spare one behind them, and the ``K * etp`` of them that each token has."""


class AllToAllDispatcher(GroupDispatcher):
    """Dropless or capped routing over any number of ranks.

    Split sizes must be known on the host, and the sizes of buffers too: each dispatch waits for the device once. In
    exchange memory is exactly what the routing needs and nothing can overflow. With a bound every pair of ranks
    exchanges equally many rows, the bound for each pair; those without a token travel for nothing.
    """

    syncs_without_bound = 1

    def dispatch_preprocess(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        if self.recv_capacity_factor is not None:
            return self._bounded(x_TD, routing)
        ids_TK, counts_E = routing.expert_ids_TK.contiguous(), routing.counts_E
        T, K = ids_TK.shape
        # Ranks hold experts in order, so rows sorted by expert are sorted by destination.
        by_expert = route_map(ids_TK, counts_E, routing.max_rows)
        counts_pe = self.by_rank(counts_E)
        counts_Ge, rows_p = self._exchange_counts(counts_pe), counts_pe.sum(1)
        to_ep, receive = self.read_sizes(rows_p, counts_Ge)

        R, copies = sum(to_ep), self.etp_size
        slot_of, row_of = by_expert.slot_of_R[:R], by_expert.row_of_TK[..., None]
        if copies > 1:
            slot_of = torch.cat([part for part in slot_of.split(to_ep) for _ in range(copies)])
            # Copy j of a row follows the j-th copy of its rank's whole block.
            p_TK1 = ids_TK.clamp_min(0)[..., None] // self.chunk
            ahead_p = rows_p.cumsum(0) - rows_p
            copy = torch.arange(copies, device=ids_TK.device)
            row_of = row_of + ahead_p[p_TK1] * (copies - 1) + rows_p[p_TK1] * copy
        # The spare row: some slot in, zero back. Without tokens there is none.
        slot_of = torch.cat([slot_of, by_expert.slot_of_R[-1:]])
        row_of = torch.where(ids_TK[..., None] < 0, R * copies, row_of)
        home = RouteMap(slot_of, row_of.view(T, K * copies), by_expert.offsets_E, K)
        rows = gather_rows(x_TD, home.token_of_R, home.row_of_TK)
        weights = gather_rows(routing.weights_TK.reshape(-1), slot_of, row_of.view(T * K, copies))
        send = [n for n in to_ep for _ in range(copies)]
        here_Ge = counts_Ge[:, : self.last - self.first]
        return Dispatched(rows, weights, here_Ge.sum(0), None, _Way(send, receive, here_Ge, home))

    def _bounded(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """The same into blocks of equal size, one for each rank, in which rows keep their order."""
        T, K = routing.expert_ids_TK.shape
        G, copies = self.ep_size * self.etp_size, self.etp_size
        block = self.bound_on(routing.max_rows, min(routing.max_rows, T * self.chunk))
        fits = (self.by_rank(routing.counts_E).sum(1) <= block).all()
        ids_TK, counts_E = self.within(fits, routing.expert_ids_TK.contiguous(), routing.counts_E)
        counts_pe = self.by_rank(counts_E)
        counts_Ge, rows_p = self._exchange_counts(counts_pe), counts_pe.sum(1)

        by_expert = route_map(ids_TK, counts_E, routing.max_rows)
        p_TK1 = ids_TK.clamp_min(0)[..., None].long() // self.chunk
        within_TK1 = by_expert.row_of_TK[..., None] - (rows_p.cumsum(0) - rows_p)[p_TK1]
        copy = torch.arange(copies, device=ids_TK.device)
        row_of = torch.where(ids_TK[..., None] < 0, G * block, (p_TK1 * copies + copy) * block + within_TK1)
        # Rows without a slot take the first; the spare one, to which several may point, does so again at the end.
        slots = torch.arange(T * K, device=ids_TK.device).repeat_interleave(copies)
        slot_of = slots.new_zeros(G * block + (T * K > 0)).scatter_(0, row_of.flatten(), slots)
        slot_of[G * block :].zero_()
        home = RouteMap(slot_of, row_of.view(T, K * copies), by_expert.offsets_E, K)
        rows = gather_rows(x_TD, home.token_of_R, home.row_of_TK)
        weights = gather_rows(routing.weights_TK.reshape(-1), slot_of, row_of.view(T * K, copies))
        # A rank without experts has one of which it gets no row.
        here_Ge = counts_Ge[:, : max(self.last - self.first, 1)]
        way = _Way([block] * G, [block] * G, here_Ge, home)
        return Dispatched(rows, weights, here_Ge.sum(0), None, way)

    def _exchange_counts(self, counts_pe: Tensor) -> Tensor:
        sent_Ge = counts_pe.repeat_interleave(self.etp_size, 0)
        counts_Ge = torch.empty_like(sent_Ge)
        dist.all_to_all_single(counts_Ge, sent_Ge, group=self.group)
        return counts_Ge

    def read_sizes(self, rows_p: Tensor, counts_Ge: Tensor) -> tuple[list[int], list[int]]:
        """Rows to each ep rank and from each rank, on the host: the sync."""
        sizes = torch.cat([rows_p, counts_Ge.sum(1)]).tolist()
        return sizes[: self.ep_size], sizes[self.ep_size :]

    def token_dispatch(self, dispatched: Dispatched) -> Dispatched:
        way = dispatched.state
        x, weights = swap(dispatched.x, dispatched.weights, send=way.send, receive=way.receive, group=self.group)
        return Dispatched(x, weights, dispatched.counts_E, None, way)

    def dispatch_postprocess(self, dispatched: Dispatched) -> Dispatched:
        by_expert = _by_expert if self.recv_capacity_factor is None else _blocks_by_expert
        map_ = by_expert(dispatched.state.counts_Ge, dispatched.x.shape[0])
        return Dispatched(dispatched.x, dispatched.weights, dispatched.counts_E, map_, dispatched.state)

    def combine_preprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y

    def token_combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        way = dispatched.state
        spare = way.home.token_of_R.shape[0] - sum(way.send)
        return swap(y, send=way.receive, receive=way.send, group=self.group, spare=spare)[0]

    def combine_postprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return combine(y, dispatched.state.home)


def _by_expert(counts_Ge: Tensor, R: int) -> RouteMap:
    """The map from rows ordered by (rank, expert) to rows ordered by (expert, rank), without a sort."""
    sizes = counts_Ge.flatten()
    ahead_Ge = (sizes.cumsum(0) - sizes).view_as(counts_Ge)
    sizes_t = counts_Ge.t().flatten()
    ahead_t_Ge = (sizes_t.cumsum(0) - sizes_t).view(counts_Ge.shape[1], counts_Ge.shape[0]).t()
    at_R = torch.arange(R, device=sizes.device)
    row_of = at_R + (ahead_t_Ge - ahead_Ge).flatten().repeat_interleave(sizes, output_size=R)
    token_of = torch.empty_like(at_R).scatter_(0, row_of, at_R)
    token_of = torch.cat([token_of, at_R[:1]])
    return RouteMap(token_of, row_of[:, None], offsets_of(counts_Ge.sum(0)), 1)


def _blocks_by_expert(counts_Ge: Tensor, R: int) -> RouteMap:
    """The same from equal blocks of rows, one for each rank, of which the first are in use."""
    G, e = counts_Ge.shape
    at = torch.arange(R // G, device=counts_Ge.device).repeat(G, 1)
    ids = torch.searchsorted(counts_Ge.cumsum(1), at, right=True)
    return route_map(torch.where(ids < e, ids, -1).view(-1, 1), counts_Ge.sum(0), R)
