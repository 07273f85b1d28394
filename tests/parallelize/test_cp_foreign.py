"""Context parallelism of attention that is not ours: ``scaled_dot_product_attention`` is caught in its forward."""

import layouts
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from titan_moe.config.job import Parallelism
from titan_moe.errors import ConfigError
from titan_moe.models.loss import cross_entropy_sum
from titan_moe.parallelize import Attention, Replicate, build_meshes, parallelize
from titan_moe.parallelize.context import ContextParallel, SharedAttention, shard_sequence

SEQ, VOCAB, CP = 24, 40, 2


class Block(nn.Module):
    """Causal attention in plain torch."""

    def __init__(self, mask=None, dropout=0.0, causal=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mask, self.dropout, self.causal = mask, dropout, causal

    def forward(self, x):
        q, k, v = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mask = None if self.mask is None else self.mask(x.shape[1], x.dtype)
        causal = self.causal and mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout, is_causal=causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, **block):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(SEQ, 16)
        self.layers = nn.ModuleList([Block(**block), Block()])
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids, positions):
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain_model(**block):
    torch.manual_seed(3)
    return Model(**block).double()


def transformers_model():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation="eager").double()


def run_plain(model, batch, positions):
    return model(batch["input_ids"], positions)


def run_transformers(model, batch, positions):
    # Positions with a gap would be read as packed documents, but for the mask of real tokens.
    ids = batch["input_ids"]
    return model(ids, position_ids=positions.expand_as(ids), attention_mask=torch.ones_like(ids)).logits


def drawn_batch():
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCAB, (2, 2, SEQ), generator=generator)
    return {"input_ids": ids, "labels": labels}


def additive(length, dtype):
    return torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)


def boolean(length, dtype):
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


MASKS = {"additive": additive, "boolean": boolean, None: None}


def gradient_errors(kind, method, mask=None):
    make, forward = (plain_model, run_plain) if kind == "plain" else (transformers_model, run_transformers)
    block = {"mask": MASKS[mask]} if mask else {}
    meshes = build_meshes(Parallelism(context_parallel_degree=CP))
    batch = drawn_batch()
    oracle = make(**block)
    cross_entropy_sum(forward(oracle, batch, torch.arange(SEQ)), batch["labels"]).backward()
    attention = "layers.*" if kind == "plain" else "**.self_attn"
    model = parallelize(make(**block), meshes, {attention: Attention(method), "**": Replicate()})
    part = shard_sequence(batch, meshes.dense["cp"].get_local_rank(), CP)
    cross_entropy_sum(forward(model, part, part["positions"]), part["labels"]).backward()
    return layouts.gradient_errors(model, {name: p.grad for name, p in oracle.named_parameters()})


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("kind", ["plain", "transformers"])
def test_gradients_of_a_foreign_model_are_those_of_one_process(run_ranks, kind, method):
    for errors in run_ranks(CP, gradient_errors, kind, method):
        assert len(errors) > 10 and max(errors.values()) < 1e-10, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("mask", ["additive", "boolean"])
def test_a_mask_that_is_the_causal_one_will_do(run_ranks, mask):
    for errors in run_ranks(CP, gradient_errors, "plain", "allgather", mask):
        assert max(errors.values()) < 1e-10


def windowed(length, dtype):
    return boolean(length, dtype).triu(-3)


def biased(length, dtype):
    return additive(length, dtype) + torch.eye(length, dtype=dtype)


def refusals():
    parallel = ContextParallel(dist.group.WORLD, "allgather")
    texts = []
    for block in ({"mask": windowed}, {"mask": biased}, {"dropout": 0.1}, {"causal": False}):
        with pytest.raises(ConfigError) as caught, SharedAttention(parallel, "layers.0"):
            Block(**block)(torch.ones(1, 8, 16))
        texts.append(str(caught.value))
    with pytest.raises(ConfigError) as caught, SharedAttention(parallel, "layers.0"):
        torch.ones(2) + 1
    return [*texts, str(caught.value)]


def test_what_cannot_be_shared_is_refused(run_ranks):
    for texts in run_ranks(2, refusals):
        assert all(text.startswith("context parallelism of layers.0: ") for text in texts)
        wanted = ["its mask is not the plain causal one"] * 2 + ["dropout 0.1", "not causal", "called no scaled_dot"]
        assert all(part in text for part, text in zip(wanted, texts, strict=True))
