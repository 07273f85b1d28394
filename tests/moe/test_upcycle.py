"""An upcycled layer computes what the dense FFN computed, to 1e-12 in float64."""

import pytest
import torch
import torch.nn.functional as F

from titan_moe.errors import ConfigError
from titan_moe.moe import MoEConfig, upcycle

H, D = 12, 8
DENSE = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "geglu": lambda g, u: F.gelu(g) * u,
    "relu2": lambda g, u: F.relu(u) ** 2,
    "clamped_swiglu": lambda g, u: (
        (u.clamp(-0.5, 0.5) + 1) * g.clamp(max=0.5) * torch.sigmoid(1.702 * g.clamp(max=0.5))
    ),
}


def ffn(seed=0):
    torch.manual_seed(seed)
    shapes = (H, D), (H, D), (D, H)
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def build(granularity=1, num_experts=8, top_k=2, gate=True, router_rows=None, **overrides):
    gate_HD, up_HD, down_DH = ffn()
    config = MoEConfig(D, H // granularity, num_experts, top_k, activation_limit=0.5, **overrides)
    return upcycle(gate_HD if gate else None, up_HD, down_DH, config, granularity, router_rows)


@pytest.mark.parametrize("experts", ["grouped", "sequential"])
@pytest.mark.parametrize("activation", list(DENSE))
@pytest.mark.parametrize("granularity, top_k", [(1, 2), (2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize(
    "scoring",
    [
        {},
        {"normalize_weights": False},
        {"score_function": "sigmoid", "route_scale": 2.5},
        {"score_function": "sigmoid", "normalize_weights": False},
        {"score_function": "sqrtsoftplus", "normalize_weights": False, "route_scale": 0.7},
        {"num_groups": 4, "topk_groups": 2, "num_experts": 16},
    ],
    ids=["post-softmax", "pre-softmax", "sigmoid-normalised", "sigmoid", "sqrtsoftplus", "groups"],
)
def test_upcycled_layer_equals_the_dense_ffn(experts, activation, granularity, top_k, scoring):
    gate_HD, up_HD, down_DH = ffn()
    layer = build(
        granularity, top_k=top_k, gate=activation != "relu2", experts=experts, activation=activation, **scoring
    )
    x = torch.randn(2, 9, D, dtype=torch.float64)
    expected = DENSE[activation](x @ gate_HD.T, x @ up_HD.T) @ down_DH.T
    torch.testing.assert_close(layer(x), expected, atol=1e-12 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("granularity", [1, 2])
def test_post_softmax_is_exact_for_any_router(granularity):
    gate_HD, up_HD, down_DH = ffn()
    rows = torch.randn(8 // granularity, D, dtype=torch.float64)
    layer = build(granularity, 8, 2 * granularity, router_rows=rows)
    x = torch.randn(1, 50, D, dtype=torch.float64)
    expected = (F.silu(x @ gate_HD.T) * (x @ up_HD.T)) @ down_DH.T
    torch.testing.assert_close(layer(x), expected, atol=1e-12 * expected.abs().max().item(), rtol=0)
    ids = layer.router(x.view(-1, D), layer.balance)[0].expert_ids_TK
    assert ids.unique().numel() == 8  # the router does choose


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_one_expert_per_token_is_exact_although_its_weight_is_not_normalised(score):
    gate_HD, up_HD, down_DH = ffn()
    layer = build(1, 8, 1, score_function=score, normalize_weights=True, route_scale=2.5)
    x = torch.randn(1, 50, D, dtype=torch.float64)
    expected = (F.silu(x @ gate_HD.T) * (x @ up_HD.T)) @ down_DH.T
    torch.testing.assert_close(layer(x), expected, atol=1e-12 * expected.abs().max().item(), rtol=0)


def test_expert_layout_and_router_rows():
    gate_HD, up_HD, down_DH = ffn()
    rows = torch.arange(4 * D, dtype=torch.float64).view(4, D)
    layer = build(2, 8, 2, router_rows=rows)
    for expert, shard in ((0, 0), (1, 1), (6, 0), (7, 1)):
        part = slice(shard * 6, shard * 6 + 6)
        assert torch.equal(layer.experts.w1[expert, 0], gate_HD[part])
        torch.testing.assert_close(layer.experts.w1[expert, 1], up_HD[part] * 2**0.5)
        torch.testing.assert_close(layer.experts.w2[expert], down_DH[:, part] * 2**0.5)
    assert torch.equal(layer.router.weight[4], rows[2]) and torch.equal(layer.router.weight[5], rows[2])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"granularity": 2, "top_k": 3}, "top_k = 3 is not a multiple of granularity = 2"),
        ({"granularity": 2, "num_experts": 7}, "num_experts = 7 is not a multiple of granularity = 2"),
        ({"granularity": 5}, "granularity = 5 does not divide"),
        ({"gate": False}, "does not fit an FFN with no gate_proj"),
        ({"activation": "relu2"}, "does not fit an FFN with a gate_proj"),
        ({"shared_hidden_dim": 4}, "shared_hidden_dim = 4 has no counterpart"),
        ({"latent_dim": 4}, "latent_dim = 4 has no counterpart"),
        ({"router_rows": torch.zeros(3, D)}, "router_rows"),
        ({"selection": "expert_choice"}, "selection = 'expert_choice' has no counterpart"),
        ({"selection": "sinkhorn"}, "selection = 'sinkhorn' has no counterpart"),
        ({"selection": "round_robin"}, "selection = 'round_robin' has no counterpart"),
        ({"capacity_factor": 8.0}, "capacity_factor = 8.0 has no counterpart"),
        (
            {"granularity": 4, "num_experts": 24, "top_k": 4, "num_groups": 4, "topk_groups": 2},
            "groups of 6 experts, which cut the copies of 4 .* Set num_groups = 1",
        ),
    ],
)
def test_what_cannot_be_upcycled_says_why(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


def test_hidden_dim_must_be_the_shard_width():
    with pytest.raises(ConfigError, match="Set hidden_dim = 6"):
        upcycle(*ffn(), MoEConfig(D, H, 8, 2), granularity=2)
