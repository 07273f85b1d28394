"""Turn a dense gated FFN into an MoE layer that computes the same function (report section 7.6).

Hidden width H, granularity G, E = B G experts of width H/G. Expert b G + g holds shard g of the hidden dim, for every
b: the G experts of copy b together are the dense FFN. Router rows are repeated G times, so the experts of a copy share
one logit, and with K a multiple of G a token takes K/G whole copies. Its output is then

    sum over chosen copies c of p_c sum_g shard_g(x) = (sum_c p_c) dense(x),

with p_c the weight of one expert of copy c. The layer equals the dense FFN once this factor is undone by
s = 1 / sum_c p_c:

- weights that sum to 1 over the K chosen experts (``normalize_weights``): sum_c p_c = 1/G, so s = G for every router;
- softmax over all experts, not renormalised: sum_c p_c depends on the token, except where the router is uniform; then
  p = 1/E and s = G E / K, in the report's terms B G^2 / K. So the router starts at zero unless rows are given, and
  given rows are exact only in so far as they are small;
- sigmoid and sqrt-softplus without normalising, or with K = 1, which is never normalised: likewise, with p their
  value at logit 0.

Group limits keep this as long as no group cuts a copy. Selections that balance, and capacity, do not.

``route_scale`` divides s. The factor s must go into the weights, and only into those the output is linear (or
quadratic) in: scaling the gate would move silu and gelu along their curve. For SwiGLU and GeGLU up and down each take
s^(1/2); relu2 is quadratic in up, so up and down each take s^(1/3), which gives s^(2/3) s^(1/3); clamped SwiGLU
clamps gate and up, so down takes all of s.
"""

import math

import torch
from torch import Tensor

from titan_moe.errors import ConfigError
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.layer import MoE


def _sums_to_1(config: MoEConfig) -> bool:
    """Whether a token's weights, without route_scale, sum to 1 for any router."""
    return config.normalize_weights and (config.score_function == "softmax" or config.top_k > 1)


def _weight_at_zero_logits(config: MoEConfig) -> float:
    """Routing weight of one chosen expert where every logit is 0, without route_scale."""
    if _sums_to_1(config):
        return 1 / config.top_k
    return {
        "softmax": 1 / config.num_experts,
        "sigmoid": 0.5,
        "sqrtsoftplus": math.sqrt(math.log(2)),
    }[config.score_function]


def _check(gate_HD: Tensor | None, up_HD: Tensor, down_DH: Tensor, config: MoEConfig, granularity: int) -> None:
    H, D = up_HD.shape
    G, E, K = granularity, config.num_experts, config.top_k
    if (gate_HD is not None) != config.gated:
        have = "no gate_proj" if gate_HD is None else "a gate_proj"
        raise ConfigError(f"activation = {config.activation!r} does not fit an FFN with {have}. Change the activation.")
    if D != config.dim or down_DH.shape != (D, H) or (gate_HD is not None and gate_HD.shape != (H, D)):
        shapes = [tuple(t.shape) for t in (gate_HD, up_HD, down_DH) if t is not None]
        raise ConfigError(f"FFN weights {shapes} do not fit dim = {config.dim}. Set dim to the FFN's input size.")
    if G < 1 or H % G:
        raise ConfigError(f"granularity = {G} does not divide the FFN's hidden dim {H}. Choose a divisor.")
    if config.hidden_dim != H // G:
        raise ConfigError(f"hidden_dim = {config.hidden_dim}: must be {H} / {G}. Set hidden_dim = {H // G}.")
    if E % G:
        raise ConfigError(
            f"num_experts = {E} is not a multiple of granularity = {G}. Set num_experts = {E // G * G or G}."
        )
    if K % G:
        raise ConfigError(f"top_k = {K} is not a multiple of granularity = {G}. Set top_k = {max(K // G, 1) * G}.")
    if (size := E // config.num_groups) % G:
        raise ConfigError(
            f"num_groups = {config.num_groups} makes groups of {size} experts, which cut the copies of {G} that "
            f"granularity = {G} makes. Set num_groups = 1."
        )
    for name, neutral in (
        ("selection", "top_k"),
        ("capacity_factor", None),
        ("shared_hidden_dim", 0),
        ("latent_dim", None),
        ("weight_on", "activation"),
    ):
        if (value := getattr(config, name)) != neutral:
            raise ConfigError(f"{name} = {value!r} has no counterpart in a dense FFN. Leave {name} out.")


@torch.no_grad()
def upcycle(
    gate_HD: Tensor | None,
    up_HD: Tensor,
    down_DH: Tensor,
    config: MoEConfig,
    granularity: int = 1,
    router_rows: Tensor | None = None,
) -> MoE:
    """An MoE layer that starts as the given dense FFN: ``down @ (act(gate @ x) * (up @ x))``.

    Args:
        gate_HD, up_HD, down_DH: weights of gate_proj (None for relu2), up_proj and down_proj.
        config: the layer; ``hidden_dim`` is H / granularity.
        granularity: G, experts that one copy of the FFN is cut into.
        router_rows: ``[num_experts / G, D]``, one row per copy. None: normal with std 0.02 where any router is exact,
            else zero.

    Returns:
        The layer, on the weights' device and in their dtype.

    Raises:
        ConfigError: where sizes do not divide, or the layer has parts or a selection that a dense FFN has not.
    """
    _check(gate_HD, up_HD, down_DH, config, granularity)
    D = config.dim
    G, E, F_ = granularity, config.num_experts, config.hidden_dim
    B = E // G
    with torch.device(up_HD.device):
        layer = MoE(config).to(up_HD.dtype)

    scale = G / (config.top_k * _weight_at_zero_logits(config) * config.route_scale)
    on_up, on_down = {"relu2": (1 / 3, 1 / 3), "clamped_swiglu": (0.0, 1.0)}.get(config.activation, (0.5, 0.5))
    w1 = [up_HD * scale**on_up] if gate_HD is None else [gate_HD, up_HD * scale**on_up]
    shards_GnFD = torch.stack(w1).view(-1, G, F_, D).transpose(0, 1)
    shards_GDF = (down_DH * scale**on_down).view(D, G, F_).transpose(0, 1)
    layer.experts.w1.copy_(shards_GnFD.repeat(B, 1, 1, 1))
    layer.experts.w2.copy_(shards_GDF.repeat(B, 1, 1))
    for bias in (layer.experts.b1, layer.experts.b2):
        if bias is not None:
            bias.zero_()

    if router_rows is None:
        router_rows = torch.zeros(B, D, dtype=up_HD.dtype, device=up_HD.device)
        if _sums_to_1(config):
            router_rows.normal_(std=0.02)
    elif router_rows.shape != (B, D):
        raise ConfigError(f"router_rows {tuple(router_rows.shape)}: must be {(B, D)}, one row per copy of the FFN.")
    layer.router.weight.copy_(router_rows.repeat_interleave(G, 0))
    return layer
