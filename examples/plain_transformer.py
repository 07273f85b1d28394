"""A Mixture-of-Experts transformer in plain torch, as anybody might write it. Nothing here knows of processes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH, DIM, HEADS = 96, 12, 32, 4
EXPERTS, TOP_K, EXPERT_HIDDEN = 8, 2, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.head_norm = nn.RMSNorm(DIM // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.n_heads, DIM // HEADS)
        q = self.head_norm(self.query(x).view(shape)).transpose(1, 2)
        k = self.head_norm(self.key(x).view(shape)).transpose(1, 2)
        v = self.value(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERT_HIDDEN, bias=False)
        self.up = nn.Linear(DIM, EXPERT_HIDDEN, bias=False)
        self.down = nn.Linear(EXPERT_HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SparseFeedForward(nn.Module):
    """Each token visits the experts that score best."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.choose(tokens).softmax(-1).topk(TOP_K)
        weights = scores / scores.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            y = y.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.feed_forward = SparseFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """Token ids ``[batch, length]`` to logits ``[batch, length, VOCAB]``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
