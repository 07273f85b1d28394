"""Dispatchers over the ``deep_ep`` package: a token travels once to each rank, however many of its experts live there.

Sent per rank and direction: D elements for each pair of a token and another rank that holds one of its experts, at
most ``min(K, ep)`` per token; under uniform routing ``n (1 - (1 - 1/n)^K) (n - 1) / n`` for n ranks. Sums over the
experts of one rank are formed there before the way back.

Both back ends know only experts in equal blocks per rank. So each expert gets one number per rank that computes on
it, ``rank * block + place``, which covers an E that ep does not divide and the slices of etp alike.

Not yet run on the hardware these packages need: tested against doubles of their public interface.
"""

import importlib
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.errors import ConfigError
from titan_moe.kernels.route_map import route_map
from titan_moe.moe.dispatch.base import Dispatched, GroupDispatcher
from titan_moe.moe.dispatch.wire import all_gather
from titan_moe.moe.routing import Routing, count_experts


class _Buffers(dict[str, Any]):
    """A group's buffers by back end: one serves all layers, as it is large and calls do not overlap."""


# Dispatchers hold them, and they the group. Held here too, they would keep both for ever.
_BUFFERS: WeakValueDictionary[dist.ProcessGroup, _Buffers] = WeakValueDictionary()

_CLASSES = {"deepep": "Buffer", "hybridep": "HybridEPBuffer"}


def load_deep_ep(name: str) -> Any:
    """The ``deep_ep`` package, if it can serve the dispatcher ``name``.

    Raises:
        ConfigError: it is not installed, or is built without what ``name`` needs.
    """
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(
            f"moe.dispatcher = {name!r} needs the package deep_ep ({error}). Install it (`titan-moe doctor` shows "
            "what is there), or set moe.dispatcher = 'alltoall'."
        ) from error
    if not hasattr(module, _CLASSES[name]):
        raise ConfigError(
            f"moe.dispatcher = {name!r} needs deep_ep.{_CLASSES[name]}, which the installed deep_ep lacks "
            "(`titan-moe doctor` shows what is there). Install a build with it, or set moe.dispatcher = 'alltoall'."
        )
    return module


def check_package(dispatcher: str) -> None:
    """Raises what ``load_deep_ep`` raises, for a dispatcher that needs it."""
    if dispatcher in _CLASSES:
        load_deep_ep(dispatcher)


class _FlexDispatcher(GroupDispatcher):
    name: str

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        etp_size: int = 1,
        recv_capacity_factor: float | None = None,
    ):
        super().__init__(num_experts, group, etp_size, recv_capacity_factor)
        self.deep_ep = load_deep_ep(self.name)
        self.block = -(-num_experts // self.ep_size)
        self.numbers = self.block * self.ep_size * etp_size
        self.buffers = _BUFFERS.setdefault(group, _Buffers())

    def _renumber(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Numbers and weights ``[T, K * etp]`` of each token's experts, one for each rank that has a part of one."""
        ids_TK1, weights_TK = routing.expert_ids_TK.long()[..., None], routing.weights_TK
        if x.dtype == torch.bfloat16:
            weights_TK = weights_TK.float()
        etp_T = torch.arange(self.etp_size, device=ids_TK1.device)
        rank = ids_TK1.clamp_min(0) // self.block * self.etp_size + etp_T
        numbers = torch.where(ids_TK1 < 0, -1, rank * self.block + ids_TK1 % self.block)
        return numbers.flatten(1), weights_TK.repeat_interleave(self.etp_size, 1)

    def _check(self, x: Tensor) -> None:
        if x.is_cuda and x.dtype != torch.bfloat16:
            raise ConfigError(
                f"moe.dispatcher = {self.name!r} moves bfloat16 only, not {str(x.dtype).removeprefix('torch.')}. "
                "Train in bfloat16, or set moe.dispatcher = 'alltoall'."
            )


@dataclass
class _Way:
    ids: Tensor
    """Of the rows that arrived: each one's experts here, -1 where there are fewer."""
    rows: int
    """Rows of the experts here."""
    handle: tuple
    event: Any
    """What to wait for before the last transfer's results are read."""


class _DeepEPDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, numbers, weights, buffer, num_experts, worst, event):
        per_rank, per_node, per_expert, is_in_rank, event = buffer.get_dispatch_layout(
            numbers, num_experts, previous_event=event, async_finish=True, allocate_on_comm_stream=True
        )
        rows, ids, weights, sizes, handle, event = buffer.dispatch(
            x,
            topk_idx=numbers,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=worst,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(ids)
        return rows, weights, ids, sum(sizes), handle, event

    @staticmethod
    @once_differentiable
    def backward(ctx, drows, dweights, *_):
        dx, dweights, _ = ctx.buffer.combine(drows.contiguous(), ctx.handle, topk_weights=dweights.contiguous())
        return dx, None, dweights, None, None, None, None


class _DeepEPCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, buffer, handle, event):
        out, _, event = buffer.combine(y, handle, previous_event=event, async_finish=True, allocate_on_comm_stream=True)
        ctx.buffer, ctx.handle = buffer, handle
        return out, event

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, *_):
        return ctx.buffer.dispatch(dout.contiguous(), handle=ctx.handle)[0], None, None, None


class DeepEPDispatcher(_FlexDispatcher):
    """DeepEP's normal kernels, ``deep_ep.Buffer``: NVLink within a node, RDMA between nodes; bfloat16, CUDA.

    ``deep_ep`` waits on the host for the number of rows that arrive. With a bound it is told the most tokens that may
    arrive instead, all of the group's, which it can do within a node; the bound is on the experts' rows. The way out
    is launched by ``token_dispatch`` and waited for by ``dispatch_postprocess``, the way back likewise, so other work
    may run between the stages. Weights travel in fp32. Not yet run on hardware.
    """

    name = "deepep"
    syncs_without_bound = 1

    def dispatch_preprocess(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        self._check(x_TD)
        numbers, weights = self._renumber(x_TD, routing)
        numbers = numbers.to(getattr(self.deep_ep, "topk_idx_t", torch.int64)).contiguous()
        worst, rows = 0, None
        if self.recv_capacity_factor is not None:
            worst = self.group.size() * x_TD.shape[0]
            rows = self.bound_on(self.group.size() * routing.max_rows, worst * self.block)
        state = numbers, worst, rows
        return Dispatched(x_TD.contiguous(), weights.contiguous(), routing.counts_E, None, state)

    def token_dispatch(self, dispatched: Dispatched) -> Dispatched:
        x, buffer, (numbers, worst, bound) = dispatched.x, self._buffer(dispatched.x), dispatched.state
        arrived, weights, ids, rows, *way = _DeepEPDispatch.apply(
            x, numbers, dispatched.weights, buffer, self.numbers, worst, buffer.capture()
        )
        way = _Way(ids, rows if bound is None else bound, *way)
        return Dispatched(arrived, weights, dispatched.counts_E, None, way)

    def dispatch_postprocess(self, dispatched: Dispatched) -> Dispatched:
        way = dispatched.state
        way.event.current_stream_wait()
        ids = way.ids.long()
        counts_E = count_experts(ids, self.last - self.first)
        if self.recv_capacity_factor is not None:
            ids, counts_E = self.within(counts_E.sum() <= way.rows, ids, counts_E)
        map_ = route_map(ids, counts_E, way.rows)
        return Dispatched(dispatched.x, dispatched.weights, counts_E, map_, way)

    def combine_preprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y

    def token_combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        buffer = self._buffer(y)
        out, dispatched.state.event = _DeepEPCombine.apply(y, buffer, dispatched.state.handle, buffer.capture())
        return out

    def combine_postprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        dispatched.state.event.current_stream_wait()
        return y

    def _buffer(self, x: Tensor) -> Any:
        """The group's buffer, made anew where rows have grown."""
        Buffer, size = self.deep_ep.Buffer, self.group.size()
        row_bytes = x.shape[1] * max(x.element_size(), 2)
        held = self.buffers
        if self.name not in held or held[self.name][0] < row_bytes:
            configs = Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)
            nvl = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
            held[self.name] = row_bytes, Buffer(self.group, nvl, rdma)
        return held[self.name][1]


class _HybridEPDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, map_TN, probs_TN, buffer, block, rows):
        x, probs_R, _, _, handle = buffer.dispatch_with_permute(
            hidden=x,
            routing_map=map_TN,
            probs=probs_TN,
            num_of_experts_per_rank=block,
            num_permuted_tokens=rows,
            non_blocking=True,
        )
        ctx.buffer, ctx.handle = buffer, handle
        return x, probs_R, handle

    @staticmethod
    @once_differentiable
    def backward(ctx, dx, dprobs, _):
        dx, dprobs = ctx.buffer.combine_with_unpermute(
            hidden=dx.contiguous(), probs=dprobs.contiguous(), handle=ctx.handle
        )
        return dx, None, dprobs, None, None, None


class _HybridEPCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, buffer, handle):
        ctx.buffer, ctx.handle, ctx.rows = buffer, handle, y.shape[0]
        return buffer.combine_with_unpermute(hidden=y, handle=handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        dy = ctx.buffer.dispatch_with_permute(
            hidden=dout.contiguous(), handle=ctx.handle, num_permuted_tokens=ctx.rows, non_blocking=True
        )[0]
        return dy, None, None


class HybridEPDispatcher(_FlexDispatcher):
    """HybridEP's kernels, ``deep_ep.HybridEPBuffer``, which also order the rows by expert; bfloat16, CUDA.

    One small all-gather and one wait for the host (none with a bound) give the number of rows that arrive, and the
    most tokens of any rank: the package wants equally many on all of them, so others are filled up with tokens
    without experts. How ranks share NVLink is told to the package by its own environment variables. Weights travel in
    fp32. Not yet run on hardware.
    """

    name = "hybridep"
    syncs_without_bound = 1

    def dispatch_preprocess(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        self._check(x_TD)
        T = x_TD.shape[0]
        mine = torch.cat([routing.counts_E, routing.counts_E.new_full((1,), T)])
        all_GE = all_gather(mine[None], 1, self.group)
        counts_E = all_GE[:, self.first : self.last].sum(0)
        numbers, weights = self._renumber(x_TD, routing)
        if self.recv_capacity_factor is None:
            most, rows = torch.stack([all_GE[:, -1].max(), counts_E.sum()]).tolist()  # the host sync
        else:
            size = self.group.size()
            most, rows = T, self.bound_on(size * routing.max_rows, size * T * self.block)
            # All ranks agree on it, so that none sends more than another has room for.
            fits = (self.by_rank(all_GE[:, :-1].sum(0)).sum(1) <= rows).all()
            numbers, counts_E = self.within(fits, numbers, counts_E)
        fill = (0, 0, 0, max(most, 1) - T)
        places = numbers % (self.numbers + 1)  # -1 wraps to a spare last place.
        map_TN = torch.zeros(T, self.numbers + 1, dtype=torch.bool, device=places.device).scatter_(1, places, True)
        probs_TN = weights.new_zeros(T, self.numbers + 1).scatter(1, places, weights)
        map_TN, probs_TN = (F.pad(t[:, :-1], fill) for t in (map_TN, probs_TN))
        return Dispatched(F.pad(x_TD, fill), probs_TN, counts_E, None, (map_TN, rows, T))

    def token_dispatch(self, dispatched: Dispatched) -> Dispatched:
        x, (map_TN, rows, T) = dispatched.x, dispatched.state
        x, weights, handle = _HybridEPDispatch.apply(x, map_TN, dispatched.weights, self._buffer(x), self.block, rows)
        return Dispatched(x, weights, dispatched.counts_E, None, (handle, T))

    def dispatch_postprocess(self, dispatched: Dispatched) -> Dispatched:
        return dispatched

    def combine_preprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y

    def token_combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return _HybridEPCombine.apply(y.contiguous(), self._buffer(y), dispatched.state[0])

    def combine_postprocess(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y[: dispatched.state[1]]

    def _buffer(self, x: Tensor) -> Any:
        """The group's buffer; the package itself lets it grow."""
        held = self.buffers
        if self.name not in held:
            held[self.name] = self.deep_ep.HybridEPBuffer(
                group=self.group,
                hidden_dim=x.shape[1],
                max_num_of_tokens_per_rank=x.shape[0],
                num_local_experts=self.block,
            )
        return held[self.name]
