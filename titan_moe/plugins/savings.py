"""What each named target of recompute saves, and what it costs, by formula (report section 4.1.4).

For layers whole on one rank, with the local dispatcher and grouped experts. b bytes per element, w = max(b, 4) for what
is computed in fp32 at least; T tokens; D model dim; H query heads of K dims, G key-value heads, V dims of a value head;
q and l the latents of queries and of keys and values, r the rotated part; hidden dims F of dense layers, f of an
expert, s of the shared expert; n linears before an activation; E experts, k per token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from titan_moe.models.spec import ModelConfig


@dataclass(frozen=True)
class Saving:
    """Of one target, over all layers of a model, per micro-batch."""

    nbytes: int
    """Bytes not kept."""
    flops: int
    """Multiplications and additions of the products that run again."""


def savings(config: ModelConfig, tokens: int, seq_len: int, itemsize: int) -> dict[str, Saving]:
    """Of every target that the model has.

    Args:
        config: of the model.
        tokens: T, of a micro-batch on this rank.
        seq_len: of its sequences.
        itemsize: bytes of an element of compute.
    """
    mtp_dense = config.mtp_depth if config.num_dense_layers >= config.num_layers else 0
    depth, dense = config.num_layers + config.mtp_depth, config.num_dense_layers + mtp_dense
    layers = {"attention": depth, "dense": dense, "moe": depth - dense}
    shape, found = _Shape(config, seq_len, itemsize), {}
    for target, formulas in _FORMULAS.items():
        per_token = [[layers[where] * amount for amount in formula(shape)] for where, formula in formulas.items()]
        nbytes, flops = (tokens * sum(amounts) for amounts in zip(*per_token, strict=True))
        if nbytes:
            found[target] = Saving(nbytes, flops)
    return found


class _Shape:
    """The letters of this file's head."""

    def __init__(self, config: ModelConfig, seq_len: int, b: int) -> None:
        self.b, self.w, self.S = b, max(b, 4), seq_len
        self.D, self.H, self.G, self.K = config.dim, config.num_heads, config.num_kv_heads, config.head_dim
        attention = config.attention(0)
        self.latent = attention.latent
        self.q = (config.q_lora_rank or 0) if self.latent else 0
        self.l, self.r = (config.kv_lora_rank, config.qk_rope_head_dim) if self.latent else (0, 0)
        self.V = config.v_head_dim if self.latent else config.head_dim
        self.norms = 2 if attention.norm_over_heads else self.H + self.G
        self.norms *= attention.qk_norm
        moe = config.moe
        self.F, self.f, self.s = config.ffn_dim, moe.hidden_dim, moe.shared_hidden_dim
        self.save = moe.save
        self.gate = int(moe.shared_gate)
        self.n, self.E, self.k, self.De = 2 if moe.gated else 1, moe.num_experts, moe.top_k, moe.expert_dim


_PerToken = tuple[int, int]
"""Bytes and FLOPs of one layer and token."""


def _layernorm(x: _Shape) -> _PerToken:
    return 2 * (x.D * x.b + x.w), 0


def _qk_norm(x: _Shape) -> _PerToken:
    if x.latent:
        return x.q * x.b + (x.w if x.q else 0) + x.l * x.b + x.w, 0
    return ((x.H + x.G) * x.K * x.b + x.norms * x.w if x.norms else 0), 0


def _mla_up_proj(x: _Shape) -> _PerToken:
    if not x.latent:
        return 0, 0
    # Queries, keys, and what values are a part of, less the rotated part, which is kept for it.
    made = 2 * x.H * x.K + x.H * (x.K - x.r + x.V) - x.r
    return made * x.b, 2 * x.H * (x.q * x.K + x.l * (x.K - x.r + x.V))


def _core_attn(x: _Shape) -> _PerToken:
    return x.H * (x.V * x.b + x.w), x.S * x.H * (x.K + x.V)


def _mlp(x: _Shape) -> _PerToken:
    # Gate, its silu, up and their product. The last linear does not run again.
    return 4 * x.F * x.b, 4 * x.D * x.F


def _shared_expert(x: _Shape) -> _PerToken:
    # With a gate, what it multiplies too.
    return (x.n + 1 + x.gate) * x.s * x.b, 2 * x.n * x.D * x.s


def _moe(x: _Shape) -> _PerToken:
    shared, shared_flops = _shared_expert(x)
    width = x.n * x.f
    z = {"preact": width * x.b, "input": 0, "preact_fp8": width + 4 * -(-width // 128)}[x.save]
    rows = x.k * (z + x.w + 2 * 8)
    # Logits; ids and scores of the chosen; the sum of their scores where normalised; which rows are finite. A router
    # that computes in fp32 has its own copy of its input.
    router = x.E * x.w + x.k * (8 + x.w) + x.w + 1 + (x.D * x.w if x.b < x.w else 0)
    experts_flops = 2 * x.k * (x.n + 1) * x.De * x.f
    return rows + router + shared, 2 * x.D * x.E + experts_flops + shared_flops


_FORMULAS: Mapping[str, Mapping[str, Callable[[_Shape], _PerToken]]] = {
    "layernorm": {"attention": _layernorm},
    "qk_norm": {"attention": _qk_norm},
    "mla_up_proj": {"attention": _mla_up_proj},
    "core_attn": {"attention": _core_attn},
    "moe_act": {"moe": lambda x: (x.s * x.b, 0), "dense": lambda x: (2 * x.F * x.b, 0)},
    "mlp": {"dense": _mlp},
    "shared_expert": {"moe": _shared_expert},
    "moe": {"moe": _moe},
}
