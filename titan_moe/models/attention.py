"""Causal attention through ``scaled_dot_product_attention``: grouped-query and multi-head latent.

Shapes: B sequences, S positions, H query heads, K dims of a query or key head, V dims of a value head, D model dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from titan_moe.models.norm import RMSNorm
from titan_moe.models.rope import rotate, yarn_mscale

if TYPE_CHECKING:
    from titan_moe.models.deepseek_v3 import DeepseekV3Config
    from titan_moe.models.spec import ModelConfig


class ForwardContext:
    """What all layers of one forward pass share.

    A plain class: mixed precision casts the floats in tuples and dataclasses, and tables in bf16 lose positions.

    Args:
        cos: see ``Rotary.tables``.
        sin: see ``Rotary.tables``.
        valid_BS: real tokens; None: all.
        masks: of each ``mask_kind``; see ``attention_mask``.
    """

    def __init__(
        self, cos: Tensor, sin: Tensor, valid_BS: Tensor | None, masks: dict["MaskKind", Tensor | None]
    ) -> None:
        self.cos, self.sin, self.valid_BS, self.masks = cos, sin, valid_BS, masks


def attention_mask(
    seq_len: int,
    document_ids_BS: Tensor | None,
    window: int | None,
    sink: bool,
    *,
    device: torch.device,
    dtype: torch.dtype,
    queries_Q: Tensor | None = None,
) -> Tensor | None:
    """Additive mask ``[B or 1, 1, Q or S, S]`` (0 or -inf); None where the kernel's own causal mask is enough.

    Additive in the compute dtype, since kernels convert a boolean one in every layer, and keep the result.

    Args:
        seq_len: positions S.
        document_ids_BS: positions see only those with an equal id.
        window: positions see at most this many, themselves included; None: all earlier ones.
        sink: put the column of the attention sink, seen by all, in front.
        queries_Q: positions of the queries where they are not all S in order.
    """
    plain = document_ids_BS is None and not sink and (window is None or window >= seq_len)
    if plain and (_pieces(seq_len, device) == 1 if queries_Q is None else device.type != "cpu"):
        return None
    position = torch.arange(seq_len, device=device)
    distance = (position if queries_Q is None else queries_Q)[:, None] - position
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    seen = seen[None, None]
    if document_ids_BS is not None:
        of_query = document_ids_BS if queries_Q is None else document_ids_BS[:, queries_Q]
        seen = seen & (of_query[:, None, :, None] == document_ids_BS[:, None, None, :])
    mask = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return F.pad(mask, (1, 0)) if sink else mask


def _pieces(seq_len: int, device: torch.device) -> int:
    # The CPU kernel computes what the mask hides. With the queries in pieces, each with the keys up to its end,
    # most of the upper triangle is left out: a quarter to a third of the time.
    return min(4, max(1, seq_len // 64)) if device.type == "cpu" else 1


def attend(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
    runs: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Softmax attention, ``[B, S, H * V]``; G key-value heads, each shared by H / G query heads.

    A sink is a logit without a value in each row's softmax (GPT-OSS). It enters as one more key, in front: 8 extra
    dims are 0 in every key but that one, whose first is 1; there the query holds sink / scale.

    Args:
        mask: see ``attention_mask``; None: causal.
        scale: factor on the logits.
        sinks_H: sink logits.
        runs: (position of the first, number) of each run of consecutive queries, where those are not at the
            positions of the keys.
    """
    B, S, H, K = q_BSHK.shape
    G, V = v_BSGV.shape[2:]
    first = 0
    if sinks_H is not None:
        first = 1
        extra = F.pad((sinks_H / scale).to(q_BSHK.dtype)[:, None], (0, 7))
        q_BSHK = torch.cat((q_BSHK, extra.expand(B, S, H, 8)), dim=-1)
        sink_key = F.pad(k_BSGK.new_ones(1), (K, 7)).expand(B, 1, G, K + 8)
        k_BSGK = torch.cat((sink_key, F.pad(k_BSGK, (0, 8))), dim=1)
        v_BSGV = F.pad(v_BSGV, (0, 0, 0, 0, 1, 0))
    on_cpu = q_BSHK.device.type == "cpu"
    if on_cpu and q_BSHK.shape[-1] > V:
        # The fused CPU kernel wants one head dim; without it the whole S x S matrix is kept.
        v_BSGV = F.pad(v_BSGV, (0, q_BSHK.shape[-1] - V))
    if mask is not None and G != H and not on_cpu:
        # The CUDA kernels that take a mask do not group heads.
        k_BSGK, v_BSGV = k_BSGK.repeat_interleave(H // G, dim=2), v_BSGV.repeat_interleave(H // G, dim=2)
    q_BHSK, k_BGSK, v_BGSV = q_BSHK.transpose(1, 2), k_BSGK.transpose(1, 2), v_BSGV.transpose(1, 2)
    if mask is not None:
        mask = mask.to(q_BHSK.dtype)
    outs, offset = [], 0
    for position, length in runs or [(0, S)]:
        pieces = 1 if mask is None else _pieces(length, q_BHSK.device)
        for start, end in pairwise(length * i // pieces for i in range(pieces + 1)):
            keys = first + position + end
            if mask is not None:
                piece_mask = mask[:, :, offset + start : offset + end, :keys]
            else:
                piece_mask = causal_lower_right(end - start, keys) if keys > end - start else None
            out_BHsV = F.scaled_dot_product_attention(
                q_BHSK[:, :, offset + start : offset + end],
                k_BGSK[:, :, :keys],
                v_BGSV[:, :, :keys],
                attn_mask=piece_mask,
                is_causal=piece_mask is None,
                scale=scale,
                enable_gqa=k_BGSK.shape[1] != H,
            )
            outs.append(out_BHsV.transpose(1, 2)[..., :V])
        offset += length
    out_BSHV = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    return out_BSHV.flatten(2)


class ContextAttention(Protocol):
    """Attention of ranks that each hold a part of every sequence, called like ``attend`` with that part.

    ``mask`` is that of the queries at ``queries(positions)``.
    """

    size: int
    """Ranks that share a sequence."""
    method: str
    """How they do; one method, one kind of mask."""

    def queries(self, positions_S: Tensor) -> Tensor | None:
        """Positions of the queries that this rank attends for, given its own; None: the whole sequence."""

    def latent(self, latent_BSX: Tensor) -> Tensor:
        """What keys and values are made from, of all tokens where that is cheaper to send than they are."""

    def __call__(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        mask: Tensor | None,
        scale: float,
        sinks_H: Tensor | None = None,
        attend: Callable[..., Tensor] = attend,
    ) -> Tensor: ...


MaskKind = tuple[int | None, str | None]
"""Sliding window, and the method of context parallelism."""


def mask_kind(attention: "Attention | LatentAttention") -> MaskKind:
    """What the mask of an attention depends on."""
    parallel = attention.context_parallel
    return attention.window, None if parallel is None else parallel.method


class HeadRows(NamedTuple):
    """How the rows of a parameter enter the logits: to scale head h's by f, scale row r by ``f ** powers_R[r]``."""

    heads_R: Tensor
    powers_R: Tensor


class _SoftmaxAttention(nn.Module):
    """What attention blocks share.

    Attributes:
        context_parallel: what stands in for ``attend`` where ranks share a sequence; see ``ContextAttention``.
    """

    context_parallel: "ContextAttention | None" = None
    attend = staticmethod(attend)

    def softmax(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, mask: Tensor | None, *args: Any) -> Tensor:
        """``attend``, through ``context_parallel`` where ranks share a sequence."""
        run = self.attend if self.context_parallel is None else partial(self.context_parallel, attend=self.attend)
        return run(q_BSHK, k_BSGK, v_BSGV, mask, *args)


class Attention(_SoftmaxAttention):
    """Grouped-query attention with rotary positions.

    Args:
        config: sizes.
        qkv_bias: biases on the three input projections.
        out_bias: bias on the output projection.
        qk_norm: RMSNorm over each head of queries and keys.
        norm_over_heads: that norm is one over all heads together (MiniMax-M2).
        window: sliding window; None: the whole past.
        sinks: one learned sink logit per head.
    """

    def __init__(
        self,
        config: "ModelConfig",
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_over_heads: bool = False,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = window
        self.q_proj = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=out_bias)
        q_heads, k_heads = (config.num_heads, config.num_kv_heads) if norm_over_heads else (1, 1)
        self.norm_over_heads = norm_over_heads
        self.q_norm = RMSNorm(q_heads * config.head_dim, eps=config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(k_heads * config.head_dim, eps=config.norm_eps) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if sinks else None

    def forward(self, x_BSD: Tensor, context: ForwardContext) -> Tensor:
        q, k = self.norm_and_rotate(self.q_proj(x_BSD), self.k_proj(x_BSD), context)
        v = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.softmax(q, k, v, context.masks[mask_kind(self)], self.head_dim**-0.5, self.sinks))

    def norm_and_rotate(self, q: Tensor, k: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Queries and keys by head, from all heads' in one dim: normed where configured, with their positions."""
        if self.norm_over_heads and self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSHK, k_BSGK = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k))
        if not self.norm_over_heads and self.q_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        return rotate(q_BSHK, context.cos, context.sin), rotate(k_BSGK, context.cos, context.sin)

    def query_key_rows(self) -> dict[str, HeadRows] | None:
        """Rows of parameters that a head's logits are linear in; None: a norm makes the logits independent of them.

        A key head that serves several query heads is left alone, and the queries take the whole factor.
        """
        if self.q_norm is not None:
            return None
        K = self.head_dim
        H, G = self.q_proj.weight.shape[0] // K, self.k_proj.weight.shape[0] // K
        shares = {"q_proj": (H, 0.5), "k_proj": (G, 0.5)} if G == H else {"q_proj": (H, 1.0)}
        return {
            f"{projection}.{name}": HeadRows(torch.arange(heads).repeat_interleave(K), torch.full((heads * K,), power))
            for projection, (heads, power) in shares.items()
            for name, _ in getattr(self, projection).named_parameters()
        }


class LatentAttention(_SoftmaxAttention):
    """Multi-head latent attention: keys and values from one low-rank latent (DeepSeek-V2, arXiv 2405.04434, 2.1)."""

    window = None
    sinks = None

    def __init__(self, config: "DeepseekV3Config") -> None:
        super().__init__()
        self.nope_dim, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.kv_lora_rank, self.interleaved = config.kv_lora_rank, config.rope_interleaved
        q_dim = config.num_heads * (self.nope_dim + self.rope_dim)
        # Latent norms have their own fixed eps, as in the published models.
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.dim, q_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=1e-6)
            self.q_b_proj = nn.Linear(config.q_lora_rank, q_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.dim, self.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, config.num_heads * (self.nope_dim + self.v_dim), bias=False)
        self.o_proj = nn.Linear(config.num_heads * self.v_dim, config.dim, bias=False)
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        if config.rope_scaling is not None and config.rope_scaling.get("mscale_all_dim"):
            self.scale *= yarn_mscale(config.rope_scaling["factor"], config.rope_scaling["mscale_all_dim"]) ** 2

    def forward(self, x_BSD: Tensor, context: ForwardContext) -> Tensor:
        cos, sin = context.cos, context.sin
        q = self.q_proj(x_BSD) if hasattr(self, "q_proj") else self.q_a_layernorm(self.q_a_proj(x_BSD))
        latent, k_rope = self.kv_a_proj_with_mqa(x_BSD).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        k_rope = rotate(k_rope[:, :, None], cos[..., self.nope_dim :], sin, interleaved=self.interleaved)
        latent = self.kv_a_layernorm(latent)
        if self.context_parallel is not None:
            whole = self.context_parallel.latent(torch.cat((latent, k_rope[:, :, 0]), dim=-1))
            latent, k_rope = whole[..., : self.kv_lora_rank], whole[:, :, None, self.kv_lora_rank :]
        q, k, v = self.up_project(q, latent, k_rope, context)
        return self.o_proj(self.softmax(q, k, v, context.masks[mask_kind(self)], self.scale))

    def up_project(
        self, q_BSQ: Tensor, latent_BSL: Tensor, k_rope_BS1R: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads from the latents and the keys' rotated part.

        Args:
            q_BSQ: the queries' latent, or what ``q_proj`` made where there is none.
            latent_BSL: of keys and values.
            k_rope_BS1R: shared by all heads.
            context: what all layers share.
        """
        q = q_BSQ if hasattr(self, "q_proj") else self.q_b_proj(q_BSQ)
        q = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q = rotate(q, context.cos, context.sin, start=self.nope_dim, interleaved=self.interleaved)
        kv = self.kv_b_proj(latent_BSL).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k_nope, v = kv.split((self.nope_dim, self.v_dim), dim=-1)
        return q, torch.cat((k_nope, k_rope_BS1R.expand(-1, -1, k_nope.shape[2], -1)), dim=-1), v

    def query_key_rows(self) -> dict[str, HeadRows]:
        """See ``Attention``. The rotary part of a key is shared by all heads and left alone."""
        query = "q_proj" if hasattr(self, "q_proj") else "q_b_proj"
        H = getattr(self, query).weight.shape[0] // (self.nope_dim + self.rope_dim)
        rows = {}
        for name, powers in (
            (query, [0.5] * self.nope_dim + [1.0] * self.rope_dim),
            ("kv_b_proj", [0.5] * self.nope_dim + [0.0] * self.v_dim),
        ):
            heads_R = torch.arange(H).repeat_interleave(len(powers))
            rows[f"{name}.weight"] = HeadRows(heads_R, torch.tensor(powers).repeat(H))
        return rows
