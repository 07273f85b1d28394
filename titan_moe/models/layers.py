"""The blocks every family is made of."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.models.attention import ForwardContext
from titan_moe.models.norm import RMSNorm
from titan_moe.moe import MoE

if TYPE_CHECKING:
    from titan_moe.models.spec import ModelConfig


class TokenEmbedding(nn.Embedding):
    """An embedding that can also be the head of a tied model."""

    def as_head(self, x: Tensor) -> Tensor:
        """Logits ``[..., V]`` of hidden states ``[..., D]``."""
        return F.linear(x, self.weight)


class FeedForward(nn.Module):
    """Dense SwiGLU feed-forward of the leading layers."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(self.nonlinearity(self.gate_proj(x_BSD), self.up_proj(x_BSD)))

    def nonlinearity(self, gate: Tensor, up: Tensor) -> Tensor:
        """What stands between the linears."""
        return F.silu(gate) * up


class DecoderLayer(nn.Module):
    """Pre-norm attention, then a pre-norm MoE or dense feed-forward."""

    def __init__(self, config: "ModelConfig", attention: nn.Module, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = FeedForward(config.dim, config.ffn_dim) if dense else MoE(config.moe)

    def forward(self, x_BSD: Tensor, context: ForwardContext) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), context)
        normed_BSD = self.post_attention_layernorm(x_BSD)
        if isinstance(self.mlp, FeedForward):
            return x_BSD + self.mlp(normed_BSD)
        return x_BSD + self.mlp(normed_BSD, context.valid_BS)


class MTPBlock(nn.Module):
    """One depth of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2).

    Joins the hidden state of position t with the embedding of token t + d, the embedding first, as published
    weights have it. The normed output is both the head's input and the next depth's hidden state.
    """

    def __init__(self, config: "ModelConfig", attention: nn.Module) -> None:
        super().__init__()
        self.enorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.hnorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.eh_proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.layer = DecoderLayer(config, attention, dense=config.num_dense_layers >= config.num_layers)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        own = config.mtp_own_embeddings
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.dim) if own else None
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False) if own else None

    def forward(
        self, hidden_BSD: Tensor, embedded_BSD: Tensor | None = None, context: ForwardContext | None = None
    ) -> Tensor:
        """The depth's hidden state.

        Its own head and embedding are called in here, not from outside: sharded parameters are there within forward.

        Args:
            hidden_BSD: of the depth before.
            embedded_BSD: embedding of token t + d at t; the tokens themselves for an embedding of its own. None: apply
                the depth's own head to ``hidden_BSD``, which is its own already.
            context: what all layers share.
        """
        if embedded_BSD is None:
            return self.lm_head(hidden_BSD)
        if self.embed_tokens is not None:
            embedded_BSD = self.embed_tokens(embedded_BSD)
        joined = torch.cat((self.enorm(embedded_BSD), self.hnorm(hidden_BSD)), dim=-1)
        return self.norm(self.layer(self.eh_proj(joined), context))
