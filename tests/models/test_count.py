"""The closed forms against the real modules, and against published figures."""

import random

import pytest
import torch

from titan_moe import models
from titan_moe.errors import ConfigError
from titan_moe.models.count import (
    active_parameters,
    forward_flops,
    keys_per_query,
    layer_shares,
    parameters,
    shape_of,
    training_flops,
)

FLAVORS = [(family, flavor) for family in models.FAMILIES for flavor in models.FAMILIES[family].flavors]


def real_parameters(config: models.ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in models.from_config(config).parameters())


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_every_flavor_weighs_what_its_modules_weigh(family, flavor):
    config = models.config(family, flavor)
    assert parameters(shape_of(config)) == real_parameters(config)


def random_override(rng: random.Random, family: str) -> dict:
    fields = {
        "vocab_size": rng.randrange(10, 500),
        "num_layers": rng.randrange(1, 5),
        "num_dense_layers": rng.randrange(0, 3),
        "ffn_dim": rng.randrange(1, 99),
        "num_experts": rng.choice([4, 8, 12]),
        "top_k": rng.randrange(2, 4),
        "hidden_dim": rng.randrange(1, 99),
        "shared_hidden_dim": rng.choice([0, 24]),
        "latent_dim": rng.choice([None, 16]),
        "router_bias": rng.random() < 0.5,
        "expert_linear_bias": rng.random() < 0.5,
        "activation": rng.choice(["swiglu", "relu2"]),
        "tie_embeddings": rng.random() < 0.5,
        "mtp_depth": rng.randrange(0, 3),
        "mtp_own_embeddings": rng.random() < 0.5,
    }
    if family in ("deepseek_v3", "kimi_k2"):
        fields |= {"q_lora_rank": rng.choice([None, 40]), "v_head_dim": rng.choice([16, 48]), "kv_lora_rank": 24}
    elif family == "glm4_moe":
        fields |= {"qk_norm": rng.random() < 0.5, "attention_bias": rng.random() < 0.5}
    return dict(rng.sample(sorted(fields.items()), rng.randrange(1, len(fields))))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_random_overrides_weigh_what_their_modules_weigh(family):
    rng, tried = random.Random(family), 0
    while tried < 40:
        try:
            config = models.config(family, "debug", **random_override(rng, family))
        except ConfigError:
            continue
        assert parameters(shape_of(config)) == real_parameters(config)
        tried += 1


def test_active_parameters_are_those_that_one_token_meets():
    config = models.config("deepseek_v3", "debug", mtp_depth=1, mtp_own_embeddings=True)
    with torch.device("meta"):
        named = dict(models.from_config(config).named_parameters())
    experts = config.moe.num_experts
    met = sum(
        p.numel() * config.moe.top_k // experts if ".experts." in name else p.numel()
        for name, p in named.items()
        if not name.startswith("mtp.")
    )
    assert active_parameters(shape_of(config)) == met


@pytest.mark.parametrize(
    ("family", "flavor", "override", "total", "active"),
    [
        ("deepseek_v3", "671b", {}, 671.03e9, 37.1e9),
        ("deepseek_v3", "671b", {"mtp_depth": 1, "mtp_own_embeddings": True}, 684.49e9, 37.1e9),
        ("qwen3_moe", "235b_a22b", {}, 235.09e9, 22.2e9),
        ("kimi_k2", "1t", {}, 1026e9, 32.5e9),
    ],
)
def test_published_sizes(family, flavor, override, total, active):
    shape = shape_of(models.config(family, flavor, **override))
    assert parameters(shape) == pytest.approx(total, rel=5e-4)
    assert active_parameters(shape) == pytest.approx(active, rel=0.015)


def test_shares_of_a_layer_are_those_of_figure_34():
    shape = shape_of(models.config("deepseek_v3", "671b"))
    for seq, part, percent in ((4096, "moe", 59.4), (65536, "scores", 69.7), (262144, "scores", 90.2)):
        assert 100 * layer_shares(shape, seq)[part] == pytest.approx(percent, abs=0.05)
    at = layer_shares(shape, 19_400)
    assert at["scores"] == pytest.approx(at["moe"], rel=0.005)


def test_keys_of_packed_and_whole_sequences_by_hand():
    assert keys_per_query(100, 0, True, []) == 50
    assert keys_per_query(100, 0, False, []) == 100
    # 30 tokens that see 15 each and 10 that see 5 each.
    assert keys_per_query(40, 0, True, [30, 10]) == (30 * 15 + 10 * 5) / 40
    assert keys_per_query(100, 10, True, []) == 10 - 100 / 200


def test_components_add_up_to_the_training_flops():
    shape = shape_of(models.config("glm4_moe", "355b_a32b", mtp_depth=1))
    parts = forward_flops(shape, 8192, True, [])
    assert training_flops(shape, 8192, True, []) == pytest.approx(3 * sum(parts.values()), rel=1e-15)
    assert set(parts) == {
        "attention_linears",
        "attention_scores",
        "experts",
        "shared",
        "dense_ffn",
        "mtp_joint",
        "head",
    }
