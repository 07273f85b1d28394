"""Context parallelism: ranks that share every sequence, exactly (report section 3.2).

The sequence is cut into 2·cp chunks and rank r holds chunks r and 2·cp - 1 - r: under a causal mask every rank then
has the same work. All but attention sees local tokens only. For attention, ``allgather`` brings every rank all keys
and values, and ``alltoall`` all tokens of a share of the heads (arXiv 2309.14509).

Losses and gradients are sums over tokens, so that those of the cp ranks add up like those of data parallel ranks.
"""

from collections.abc import Callable
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from titan_moe.errors import ConfigError
from titan_moe.models.attention import attend, attention_mask
from titan_moe.models.base import shift_within_document, tokens_ahead
from titan_moe.models.loss import IGNORE
from titan_moe.moe.dispatch.wire import all_gather, scatter_sum
from titan_moe.parallelize.check import METHODS, Method, check_context


def local_positions(seq_len: int, cp_rank: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """Where the tokens of a rank stand in the sequence, int64 ``[seq_len / cp_size]``."""
    check_context(seq_len, cp_size)
    chunks = torch.arange(seq_len, device=device).view(2 * cp_size, -1)
    return torch.cat((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]))


def shard_sequence(batch: dict[str, Tensor], cp_rank: int, cp_size: int, *, mtp_depth: int = 0) -> dict[str, Tensor]:
    """A rank's part of a batch of whole sequences.

    Every tensor ``[B, S, ...]`` is cut along S but ``document_ids``, which attention needs whole. Added are
    ``positions``, and with MTP ``mtp_input_ids`` and ``mtp_labels`` ``[B, depth, S_local]``: the tokens and labels
    that lie d positions on, where another rank may hold them; see ``tokens_ahead``.

    Args:
        batch: ``input_ids`` and whatever else goes with it.
        cp_rank: this rank among those that share the sequence.
        cp_size: their number; with 1 the batch is returned as it is.
        mtp_depth: multi-token-prediction depths of the model.

    Raises:
        ConfigError: S is not a multiple of ``2 * cp_size``.
    """
    if cp_size == 1:
        return batch
    ids_BS, documents_BS = batch["input_ids"], batch.get("document_ids")
    positions = local_positions(ids_BS.shape[1], cp_rank, cp_size, ids_BS.device)
    local = {name: x if name == "document_ids" else x[:, positions] for name, x in batch.items()}
    local["positions"] = positions
    if mtp_depth:
        ahead = tokens_ahead(ids_BS, mtp_depth, documents_BS, batch.get("valid"))
        local["mtp_input_ids"] = ahead[:, :, positions]
    if mtp_depth and "labels" in batch:
        labels = [shift_within_document(batch["labels"], d + 1, documents_BS, IGNORE)[0] for d in range(mtp_depth)]
        local["mtp_labels"] = torch.stack(labels, dim=1)[:, :, positions]
    return local


class _Gather(torch.autograd.Function):
    """``[...] -> [cp, ...]``, the tensors of all ranks; the gradient of each is summed over them."""

    @staticmethod
    def forward(ctx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(local, local.shape[0], group).unflatten(0, (group.size(), -1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_sum(grad.flatten(0, 1), ctx.group), None


class _Exchange(torch.autograd.Function):
    """``[cp, ...] -> [cp, ...]``: row j goes to rank j, and row i came from rank i. Its own gradient."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, grad, ctx.group), None


def _whole(parts_RBSX: Tensor) -> Tensor:
    """The sequence ``[B, R * S, X]`` whose parts are those of R ranks."""
    low, high = parts_RBSX.unflatten(2, (2, -1)).unbind(2)
    return torch.cat((low, high.flip(0))).movedim(0, 1).flatten(1, 2)


def _parts(whole_BSX: Tensor, size: int) -> Tensor:
    """The inverse of ``_whole``."""
    low, high = whole_BSX.unflatten(1, (2 * size, -1)).movedim(1, 0).chunk(2)
    return torch.stack((low, high.flip(0)), dim=2).flatten(2, 3)


class ContextParallel:
    """Stands in for ``attend`` where the ranks of ``group`` share every sequence, cut by ``shard_sequence``.

    Exact for causal attention with documents, windows and sinks, grouped-query or latent.

    Args:
        group: the ranks of the cp axis, in its order.
        method: ``allgather``: all keys and values on every rank; gradients by reduce-scatter. ``alltoall``: all
            tokens of 1 / cp of the heads; key-value heads that do not divide are repeated.
    """

    def __init__(self, group: dist.ProcessGroup, method: Method = "allgather") -> None:
        assert method in METHODS, method
        self.group, self.method = group, method
        self.rank, self.size = group.rank(), group.size()

    def queries(self, positions_S: Tensor) -> Tensor | None:
        """Positions of the queries that this rank attends for; None: all."""
        return positions_S if self.method == "allgather" else None

    def latent(self, latent_BSX: Tensor) -> Tensor:
        """Of the whole sequence with ``allgather``, which then leaves keys and values as they are; else unchanged."""
        return _whole(_Gather.apply(latent_BSX, self.group)) if self.method == "allgather" else latent_BSX

    def __call__(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        mask: Tensor | None,
        scale: float,
        sinks_H: Tensor | None = None,
        attend: Callable[..., Tensor] = attend,
    ) -> Tensor:
        """``attend``, of which the caller may have its own, for this rank's tokens: ``[B, S, H * V]``."""
        run = self._gathered if self.method == "allgather" else self._exchanged
        return run(q_BSHK, k_BSGK, v_BSGV, mask, scale, sinks_H, attend)

    def causal(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, scale: float) -> Tensor:
        """Attention to all earlier tokens, with no mask prepared."""
        S = q_BSHK.shape[1] * self.size
        queries = self.queries(local_positions(S, self.rank, self.size, q_BSHK.device))
        mask = attention_mask(S, None, None, False, device=q_BSHK.device, dtype=q_BSHK.dtype, queries_Q=queries)
        return self(q_BSHK, k_BSGK, v_BSGV, mask, scale)

    def _gathered(self, q_BSHK, k_BSGK, v_BSGV, mask, scale, sinks_H, attend) -> Tensor:
        S, (G, K), V = q_BSHK.shape[1], k_BSGK.shape[2:], v_BSGV.shape[3]
        if k_BSGK.shape[1] == S:
            kv = _whole(_Gather.apply(torch.cat((k_BSGK, v_BSGV), dim=-1).flatten(2), self.group))
            k_BSGK, v_BSGV = kv.unflatten(2, (G, K + V)).split((K, V), dim=-1)
        chunk = S // 2
        runs = [(self.rank * chunk, chunk), ((2 * self.size - 1 - self.rank) * chunk, chunk)]
        return attend(q_BSHK, k_BSGK, v_BSGV, mask, scale, sinks_H, runs)

    def _exchanged(self, q_BSHK, k_BSGK, v_BSGV, mask, scale, sinks_H, attend) -> Tensor:
        n = self.size
        H, G = q_BSHK.shape[2], k_BSGK.shape[2]
        if H % n:
            raise ConfigError(
                f"context_parallel_method 'alltoall': {H} heads on each rank do not divide by "
                f"context_parallel_degree {n}. Use 'allgather', or a degree that divides."
            )
        # Each rank's share of the query heads comes with the key-value heads that it uses.
        repeats = lcm(G, n) // G
        k_BSGK, v_BSGV = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k_BSGK, v_BSGV))
        heads = [x.unflatten(2, (n, -1)) for x in (q_BSHK, k_BSGK, v_BSGV)]
        widths = [x.shape[3] * x.shape[4] for x in heads]
        rows = torch.cat([x.flatten(3) for x in heads], dim=-1).movedim(2, 0)
        whole = _whole(_Exchange.apply(rows, self.group))
        q, k, v = (part.unflatten(2, x.shape[3:]) for part, x in zip(whole.split(widths, dim=-1), heads, strict=True))
        sinks = None if sinks_H is None else sinks_H.chunk(n)[self.rank]
        out = _Exchange.apply(_parts(attend(q, k, v, mask, scale, sinks), n), self.group)
        return out.movedim(0, 2).flatten(2)


class SharedAttention(TorchFunctionMode):
    """Within, ``scaled_dot_product_attention`` attends to the whole sequence of which this rank holds a part.

    For attention that is not ours: the module sees its own tokens, and gives them the right positions itself.

    Args:
        parallel: the ranks and the method.
        name: of the module, for errors.
    """

    def __init__(self, parallel: ContextParallel, name: str) -> None:
        super().__init__()
        self.parallel, self.name, self.calls = parallel, name, 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        why = None
        if query.ndim != 4 or key.shape[2] != query.shape[2]:
            why = f"queries {list(query.shape)} and keys {list(key.shape)} are not [B, heads, S, dims] of one sequence"
        elif dropout_p:
            why = f"dropout {dropout_p} is not supported"
        elif attn_mask is not None and not _is_causal(attn_mask, query.shape[2]):
            why = "its mask is not the plain causal one, and only that is known beyond this rank's tokens"
        elif attn_mask is None and not is_causal:
            why = "it is not causal"
        if why:
            raise ConfigError(f"context parallelism of {self.name}: {why}. Set context_parallel_degree = 1.")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = self.parallel.causal(q, k, v, query.shape[-1] ** -0.5 if scale is None else scale)
        return out.unflatten(2, (query.shape[1], -1)).transpose(1, 2)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and not self.calls:
            raise ConfigError(
                f"context parallelism of {self.name}: it called no scaled_dot_product_attention, so its tokens saw "
                "those of this rank alone. Use that function (transformers: attn_implementation='sdpa'), or set "
                "context_parallel_degree = 1."
            )


def _is_causal(mask: Tensor, seq_len: int) -> bool:
    # The host waits for the answer: modules that pass is_causal instead are faster.
    if mask.shape[-2:] != (seq_len, seq_len):
        return False
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((mask == causal).all())
    return bool(torch.where(causal, mask == 0, mask <= torch.finfo(mask.dtype).min).all())
