"""A double of the public interface of the package ``deep_ep``, on the CPU over torch.distributed.

It answers as the package documents it: names, argument order, dtypes, shapes, what a handle holds and what -1 means.
It takes any floating dtype for tokens, so that exactness can be proved in float64. Asynchronous results are NaN
until their event is waited for. Tokens travel once per rank, by one all-to-all, so the wire can be counted.
"""

import torch
import torch.distributed as dist

topk_idx_t = torch.int64


class EventOverlap:
    """Results appear when the event is waited for."""

    def __init__(self, pending=()):
        self._pending = list(pending)

    @torch.no_grad()
    def current_stream_wait(self):
        for tensor, value in self._pending:
            tensor.copy_(value)
        self._pending.clear()


def _all_to_all(rows, send, receive, group):
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


def _filled(rows, size, value=float("nan")):
    """Up to ``size`` rows, where that is not 0."""
    assert not size or rows.shape[0] <= size
    return torch.cat([rows, rows.new_full((size - rows.shape[0], *rows.shape[1:]), value)]) if size else rows


def _sum_by(rows, index, size):
    """Rows summed where ``index`` says, in the order of the rows."""
    out = rows.new_zeros(size, *rows.shape[1:])
    for i, at in enumerate(index.tolist()):
        out[at] += rows[i]
    return out


class Config:
    def __init__(self, num_ranks):
        self.num_ranks = num_ranks

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        assert num_ranks == self.num_ranks
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    """The normal kernels within one node: no RDMA ranks."""

    made = 0

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False):
        Buffer.made += 1
        self.group, self.num_nvl_bytes = group, num_nvl_bytes
        self.rank, self.group_size = group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config(num_ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture():
        return EventOverlap()

    def _finish(self, tensors, async_finish):
        if not async_finish:
            return EventOverlap()
        pending = [(t, t.clone()) for t in tensors if t is not None and t.is_floating_point()]
        for tensor, _ in pending:
            tensor.fill_(float("nan"))
        return EventOverlap(pending)

    def _begin(self, previous_event, async_finish, allocate_on_comm_stream):
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        if previous_event is not None:
            previous_event.current_stream_wait()

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        assert topk_idx.dtype == topk_idx_t and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        assert topk_idx.numel() == 0 or (-1 <= topk_idx.min() and topk_idx.max() < num_experts)
        here = topk_idx // (num_experts // self.group_size)  # -1 stays -1
        in_rank = torch.stack([(here == r).any(1) for r in range(self.group_size)], 1)
        per_expert = torch.tensor([(topk_idx == e).sum() for e in range(num_experts)], dtype=torch.int32)
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        assert x.dim() == 2 and x.is_contiguous()
        assert x.shape[1] * max(x.element_size(), 2) * self.group_size <= self.num_nvl_bytes
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            tokens, send, receive, _, _, worst = handle
            recv_x = _filled(_all_to_all(x[tokens], send, receive, self.group), worst)
            return recv_x, None, None, None, None, self._finish([recv_x], async_finish)
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_weights.dtype == torch.float32 or x.dtype == torch.float64 == topk_weights.dtype
        assert topk_weights.shape == topk_idx.shape and topk_weights.is_contiguous()
        tokens = torch.cat([is_token_in_rank[:, r].nonzero()[:, 0] for r in range(self.group_size)])
        sent = num_tokens_per_rank.to(torch.int64)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        send, receive = sent.tolist(), received.tolist()
        assert len(tokens) == sum(send)
        recv_x = _all_to_all(x[tokens], send, receive, self.group)
        recv_idx = _all_to_all(topk_idx[tokens], send, receive, self.group)
        recv_weights = _all_to_all(topk_weights[tokens], send, receive, self.group)
        block = num_tokens_per_expert.shape[0] // self.group_size
        recv_idx = recv_idx - self.rank * block
        elsewhere = (recv_idx < 0) | (recv_idx >= block)
        recv_idx = recv_idx.masked_fill(elsewhere, -1)
        recv_weights = recv_weights.masked_fill(elsewhere, 0.0)
        sizes = [int((recv_idx == e).sum()) for e in range(block)]
        sizes = [-(-n // expert_alignment) * expert_alignment for n in sizes]
        handle = tokens, send, receive, x.shape[0], elsewhere, num_worst_tokens
        if num_worst_tokens:
            # No host knows how many arrive: buffers of the most that may, ids of -1 where none did, and no list.
            sizes = []
            recv_x, recv_weights = (_filled(t, num_worst_tokens) for t in (recv_x, recv_weights))
            recv_idx = _filled(recv_idx, num_worst_tokens, -1)
        event = self._finish([recv_x, recv_weights], async_finish)
        return recv_x, recv_idx, recv_weights, sizes, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        tokens, send, receive, T, _, worst = handle
        assert x.dim() == 2 and x.is_contiguous() and x.shape[0] == (worst or sum(receive))
        x = x[: sum(receive)]
        out = _sum_by(_all_to_all(x, receive, send, self.group), tokens, T)
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 or x.dtype == torch.float64
            topk_weights = topk_weights[: sum(receive)]
            weights = _sum_by(_all_to_all(topk_weights, receive, send, self.group), tokens, T)
        return out, weights, self._finish([out, weights], async_finish)


class HybridEPBuffer:
    """The interface with permutation."""

    made = 0

    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False):
        HybridEPBuffer.made += 1
        self.group, self.group_size, self.rank = group, group.size(), group.rank()
        assert self.group_size > 1
        self.num_local_experts = num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden,
        topk_idx=None,
        topk_weights=None,
        num_of_experts_per_rank=None,
        num_of_experts=None,
        use_fp8=None,
        routing_map=None,
        probs=None,
        scaling_factor=None,
        num_permuted_tokens=None,
        pad_multiple=None,
        handle=None,
        non_blocking=False,
    ):
        assert hidden.dim() == 2 and hidden.is_contiguous() and hidden.shape[0] > 0
        assert not non_blocking or num_permuted_tokens >= 0
        assert probs is None or probs.dtype == torch.float32 or hidden.dtype == torch.float64 == probs.dtype
        if handle is None:
            assert routing_map.dtype == torch.bool and routing_map.is_contiguous()
            block = num_of_experts_per_rank or self.num_local_experts
            assert routing_map.shape == (hidden.shape[0], block * self.group_size)
            T = hidden.shape[0]
            total = torch.tensor([T])
            dist.all_reduce(total, group=self.group)
            assert total.item() == T * self.group_size, "every rank must have equally many tokens"
            everywhere = torch.empty(T * self.group_size, routing_map.shape[1], dtype=torch.bool)
            dist.all_gather(list(everywhere.chunk(self.group_size)), routing_map, group=self.group)
            blocks = everywhere.view(self.group_size, T, self.group_size, block)
            in_rank = blocks.any(-1)  # [source, token, destination]
            tokens = torch.cat([in_rank[self.rank, :, r].nonzero()[:, 0] for r in range(self.group_size)])
            send = in_rank[self.rank].sum(0).tolist()
            receive = in_rank[:, :, self.rank].sum(1).tolist()
            here = blocks[:, :, self.rank][in_rank[:, :, self.rank]]  # rows that arrive x experts here
            expert, row = here.t().nonzero(as_tuple=True)
            handle = tokens, send, receive, T, here, expert, row, block
        tokens, send, receive, T, here, expert, row, block = handle
        arrived = _all_to_all(hidden[tokens], send, receive, self.group)
        rows = len(row) if num_permuted_tokens is None else num_permuted_tokens
        assert rows >= len(row)
        permuted = hidden.new_full((rows, hidden.shape[1]), float("nan"))
        permuted[: len(row)] = arrived[row]
        permuted_probs = None
        if probs is not None:
            arrived = _all_to_all(probs[tokens], send, receive, self.group)
            permuted_probs = probs.new_full((rows,), float("nan"))
            permuted_probs[: len(row)] = arrived[row, self.rank * block + expert]
        return permuted, permuted_probs, None, here.sum(0), handle

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, pad_multiple=None):
        tokens, send, receive, T, here, expert, row, block = handle
        assert hidden.dim() == 2 and hidden.is_contiguous()
        used = len(row)
        summed = _sum_by(hidden[:used], row, here.shape[0])
        out = _sum_by(_all_to_all(summed, receive, send, self.group), tokens, T)
        out_probs = None
        if probs is not None:
            assert probs.dtype == torch.float32 or hidden.dtype == torch.float64
            dense = probs.new_zeros(here.shape[0], block * self.group_size)
            dense[row, self.rank * block + expert] = probs[:used]
            out_probs = _sum_by(_all_to_all(dense, receive, send, self.group), tokens, T)
        return out, out_probs
