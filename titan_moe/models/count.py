"""What a model weighs and computes, in closed form: parameters and FLOPs per token, by component.

Written in the part of Python that ``titan_moe.planner.to_js`` translates, so that the planner's page computes with the
same source. Tested equal to the parameters of the real modules, which are built on meta.

A product of a token with a ``k x n`` matrix costs 2kn FLOPs forward; training costs three times the forward pass. Of
the routed experts only the top k count; the router, norms and the embedding look-up do not, nor does recomputation:
these are model FLOPs, as in the report's Table 11.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class Shape:
    """The sizes of a decoder, flat, as the formulas below and those of the planner read them. Counts of elements."""

    dim: int
    vocab: int
    num_layers: int
    """Decoder layers, without MTP."""
    num_dense: int
    """Leading layers with a dense feed-forward."""
    mtp: int
    """Multi-token-prediction depths."""
    mtp_own: bool
    """Each depth has an embedding and a head of its own."""
    tied: bool
    ffn: int
    heads: int
    kv_heads: int
    d_qk: int
    """Dims of a query or key head."""
    d_v: int
    """Dims of a value head."""
    latent: bool
    """Multi-head latent attention."""
    q_lora: int
    """0: queries come straight from the hidden state."""
    kv_lora: int
    d_rope: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    norm_over_heads: bool
    """That norm is one over all heads together."""
    sinks: bool
    windows: list[int]
    """Keys that each layer's attention reaches back, MTP layers last; 0: all."""
    experts: int
    top_k: int
    expert_hidden: int
    expert_dim: int
    halves: int
    """Linears before the activation: 2 gated, else 1."""
    expert_bias: bool
    """Biases on both expert linears."""
    router_bias: bool
    shared_hidden: int
    shared_gate: bool
    latent_dim: int
    """LatentMoE's dim; 0: none."""
    groups: int
    """Groups of experts for group-limited routing."""
    topk_groups: int


def shape_of(config: Any) -> Shape:
    """The sizes of a ``ModelConfig``."""
    moe = config.moe
    specs = [config.attention(layer) for layer in range(config.num_layers + config.mtp_depth)]
    first = specs[0]
    return Shape(
        dim=config.dim,
        vocab=config.vocab_size,
        num_layers=config.num_layers,
        num_dense=config.num_dense_layers,
        mtp=config.mtp_depth,
        mtp_own=config.mtp_own_embeddings,
        tied=config.tie_embeddings,
        ffn=config.ffn_dim,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        d_qk=config.head_dim,
        d_v=config.v_head_dim if first.latent else config.head_dim,
        latent=first.latent,
        q_lora=(config.q_lora_rank or 0) if first.latent else 0,
        kv_lora=config.kv_lora_rank if first.latent else 0,
        d_rope=config.rotary_dim,
        qkv_bias=first.qkv_bias,
        out_bias=first.out_bias,
        qk_norm=first.qk_norm,
        norm_over_heads=first.norm_over_heads,
        sinks=first.sinks,
        windows=[spec.window or 0 for spec in specs],
        experts=moe.num_experts,
        top_k=moe.top_k,
        expert_hidden=moe.hidden_dim,
        expert_dim=moe.expert_dim,
        halves=2 if moe.gated else 1,
        expert_bias=moe.expert_linear_bias,
        router_bias=moe.router_bias,
        shared_hidden=moe.shared_hidden_dim,
        shared_gate=moe.shared_gate,
        latent_dim=moe.latent_dim or 0,
        groups=moe.num_groups,
        topk_groups=moe.topk_groups,
    )


def attention_gemms(s: Shape) -> list:
    """``[name, k, n, cut]`` of each linear of the attention; ``cut``: tensor parallelism shares it."""
    if s.latent:
        gemms = []
        if s.q_lora > 0:
            gemms.append(["q_down", s.dim, s.q_lora, 0])
            gemms.append(["q_up", s.q_lora, s.heads * s.d_qk, 1])
        else:
            gemms.append(["q", s.dim, s.heads * s.d_qk, 1])
        gemms.append(["kv_down", s.dim, s.kv_lora + s.d_rope, 0])
        gemms.append(["kv_up", s.kv_lora, s.heads * (s.d_qk - s.d_rope + s.d_v), 1])
        gemms.append(["out", s.heads * s.d_v, s.dim, 1])
        return gemms
    return [
        ["q", s.dim, s.heads * s.d_qk, 1],
        ["k", s.dim, s.kv_heads * s.d_qk, 1],
        ["v", s.dim, s.kv_heads * s.d_v, 1],
        ["out", s.heads * s.d_v, s.dim, 1],
    ]


def attention_parameters(s: Shape, tp: int) -> float:
    """Elements of one attention on one of ``tp`` ranks."""
    total = 0
    for gemm in attention_gemms(s):
        cut = tp if gemm[3] == 1 else 1
        total += gemm[1] * gemm[2] / cut
    if s.latent:
        return total + s.q_lora + s.kv_lora
    if s.qkv_bias:
        total += (s.heads * s.d_qk + s.kv_heads * (s.d_qk + s.d_v)) / tp
    if s.out_bias:
        total += s.dim
    if s.qk_norm:
        total += (s.heads + s.kv_heads) * s.d_qk / tp if s.norm_over_heads else 2 * s.d_qk
    if s.sinks:
        total += s.heads / tp
    return total


def expert_parameters(s: Shape) -> float:
    """Elements of one routed expert."""
    total = (s.halves + 1) * s.expert_dim * s.expert_hidden
    if s.expert_bias:
        total += s.halves * s.expert_hidden + s.expert_dim
    return total


def router_parameters(s: Shape) -> float:
    """Elements of one router."""
    return s.experts * s.dim + (s.experts if s.router_bias else 0)


def shared_parameters(s: Shape, tp: int) -> float:
    """Elements beside router and routed experts of one MoE layer on one of ``tp`` ranks."""
    total = (s.halves + 1) * s.dim * s.shared_hidden / tp + 2 * s.dim * s.latent_dim
    if s.shared_gate:
        total += s.dim
    return total


def dense_parameters(s: Shape, dense: bool, tp: int) -> float:
    """Elements of one decoder layer on one of ``tp`` ranks, without its router and routed experts."""
    total = 2 * s.dim + attention_parameters(s, tp)
    if dense:
        return total + 3 * s.dim * s.ffn / tp
    return total + shared_parameters(s, tp)


def layer_parameters(s: Shape, dense: bool) -> float:
    """Elements of one whole decoder layer."""
    total = dense_parameters(s, dense, 1)
    if not dense:
        total += router_parameters(s) + s.experts * expert_parameters(s)
    return total


def mtp_is_dense(s: Shape) -> bool:
    """Whether MTP layers have a dense feed-forward: those of a model without MoE layers do."""
    return s.num_dense >= s.num_layers


def mtp_joint_parameters(s: Shape) -> float:
    """Elements that one MTP depth has beside its decoder layer, without an embedding and head of its own."""
    return 2 * s.dim * s.dim + 3 * s.dim


def parameters(s: Shape) -> float:
    """Elements of the whole model, shared ones once."""
    total = s.num_dense * layer_parameters(s, True) + (s.num_layers - s.num_dense) * layer_parameters(s, False)
    total += s.vocab * s.dim * (1 if s.tied else 2) + s.dim
    own = 2 * s.vocab * s.dim if s.mtp_own else 0
    return total + s.mtp * (layer_parameters(s, mtp_is_dense(s)) + mtp_joint_parameters(s) + own)


def active_parameters(s: Shape) -> float:
    """Elements that one token meets at inference: the top k experts, the embedding and the head, no MTP."""
    idle = (s.num_layers - s.num_dense) * (s.experts - s.top_k) * expert_parameters(s)
    main = parameters(s) - s.mtp * (layer_parameters(s, mtp_is_dense(s)) + mtp_joint_parameters(s))
    own = s.mtp * 2 * s.vocab * s.dim if s.mtp_own else 0
    return main - own - idle


def keys_per_query(seq: float, window: float, causal: bool, lengths: list) -> float:
    """Keys that a query meets on average; a causal sequence is counted at half of the full square.

    Args:
        seq: tokens of a sequence.
        window: keys that a query reaches back; 0: all.
        causal: whether a query sees only keys before it.
        lengths: tokens of packed documents, which do not see each other; empty: one document of ``seq``.
    """
    documents = lengths if len(lengths) > 0 else [seq]
    tokens = 0
    pairs = 0
    for length in documents:
        width = min(window, length) if window > 0 else length
        keys = width - width * width / (2 * length) if causal else width
        tokens += length
        pairs += length * keys
    return pairs / tokens


def score_flops(s: Shape, keys: float) -> float:
    """Forward FLOPs per token of Q K^T and of the weighted sum of V."""
    return 2 * keys * s.heads * (s.d_qk + s.d_v)


def attention_flops(s: Shape) -> float:
    """Forward FLOPs per token of one attention's linears."""
    total = 0
    for gemm in attention_gemms(s):
        total += 2 * gemm[1] * gemm[2]
    return total


def forward_flops(s: Shape, seq: float, causal: bool, lengths: list) -> dict:
    """Forward FLOPs per token of the whole model, MTP included, by component."""
    moe = s.num_layers - s.num_dense + (0 if mtp_is_dense(s) else s.mtp)
    dense = s.num_dense + (s.mtp if mtp_is_dense(s) else 0)
    layers = s.num_layers + s.mtp
    scores = 0
    for window in s.windows:
        scores += score_flops(s, keys_per_query(seq, window, causal, lengths))
    return {
        "attention_linears": layers * attention_flops(s),
        "attention_scores": scores,
        "experts": moe * s.top_k * 2 * (s.halves + 1) * s.expert_dim * s.expert_hidden,
        "shared": moe * 2 * ((s.halves + 1) * s.dim * s.shared_hidden + 2 * s.dim * s.latent_dim),
        "dense_ffn": dense * 2 * 3 * s.dim * s.ffn,
        "mtp_joint": s.mtp * 2 * 2 * s.dim * s.dim,
        "head": (1 + s.mtp) * 2 * s.dim * s.vocab,
    }


def training_flops(s: Shape, seq: float, causal: bool, lengths: list) -> float:
    """FLOPs of one training step per token."""
    forward = forward_flops(s, seq, causal, lengths)
    total = 0
    for name in forward:
        total += forward[name]
    return 3 * total


def layer_shares(s: Shape, seq: float) -> dict:
    """Shares of one causal MoE layer's forward FLOPs, as in the report's Figure 34; router and norms left out."""
    moe = s.top_k * 2 * (s.halves + 1) * s.expert_dim * s.expert_hidden
    moe += 2 * ((s.halves + 1) * s.dim * s.shared_hidden + 2 * s.dim * s.latent_dim)
    scores = score_flops(s, keys_per_query(seq, 0, True, []))
    linears = attention_flops(s)
    total = moe + scores + linears
    return {"moe": moe / total, "scores": scores / total, "linears": linears / total}
