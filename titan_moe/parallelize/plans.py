"""Plans of known model families, as data.

All of them, transformers' models included, name their parts alike, so one table serves them: a pattern that a family
has no module for is not used.
"""

from torch import nn

from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.styles import (
    Attention,
    Colwise,
    Experts,
    Replicate,
    Router,
    Rowwise,
    SequenceParallel,
    ShardedNorm,
    VocabParallel,
)

DECODER: Plan = {
    "**.embed_tokens": VocabParallel(),
    "**.lm_head": VocabParallel(),
    # Norms of the stream.
    "**.input_layernorm": SequenceParallel(),
    "**.post_attention_layernorm": SequenceParallel(),
    "**.norm": SequenceParallel(),
    "**.enorm": SequenceParallel(),
    "**.hnorm": SequenceParallel(),
    # Multi-token prediction joins two streams.
    "**.eh_proj": Replicate(),
    # Grouped-query attention; norms of single heads.
    "**.self_attn": Attention(),
    "**.self_attn.q_proj": Colwise(),
    "**.self_attn.k_proj": Colwise(),
    "**.self_attn.v_proj": Colwise(),
    "**.self_attn.q_norm": Replicate(),
    "**.self_attn.k_norm": Replicate(),
    "**.self_attn.o_proj": Rowwise(),
    # Latent attention: latents are small, so each rank makes those of its tokens, and all are gathered.
    "**.self_attn.q_a_proj": Replicate("gathered"),
    "**.self_attn.q_a_layernorm": Replicate(),
    "**.self_attn.q_b_proj": Colwise(),
    "**.self_attn.kv_a_proj_with_mqa": Replicate("gathered"),
    "**.self_attn.kv_a_layernorm": Replicate(),
    "**.self_attn.kv_b_proj": Colwise(),
    # Dense feed-forward and shared expert.
    "**.mlp.gate_proj": Colwise(),
    "**.mlp.up_proj": Colwise(),
    "**.mlp.down_proj": Rowwise(),
    "**.mlp.shared.gate_proj": Colwise(),
    "**.mlp.shared.up_proj": Colwise(),
    "**.mlp.shared.down_proj": Rowwise(),
    "**.mlp.shared.gate": Replicate("gathered"),
    **{
        f"**.mlp.{shared}.{name}": style
        for shared in ("shared_expert", "shared_experts")
        for name, style in (("gate_proj", Colwise()), ("up_proj", Colwise()), ("down_proj", Rowwise()))
    },
    "**.mlp.shared_expert_gate": Replicate(),
    # Routed experts; transformers calls most routers gates.
    "**.mlp.gate": Router(),
    "**.mlp.router": Router(),
    "**.mlp.experts": Experts(),
    "**.mlp.latent_down": Replicate(),
    "**.mlp.latent_up": Replicate(),
}

PLANS: dict[str, Plan] = dict.fromkeys(
    ("qwen2_moe", "qwen3_moe", "deepseek_v3", "kimi_k2", "mixtral", "gpt_oss", "glm4_moe"), DECODER
)
# One norm over all heads, of which a rank has some.
PLANS["minimax_m2"] = DECODER | dict.fromkeys(("**.self_attn.q_norm", "**.self_attn.k_norm"), ShardedNorm())
"""By model family."""


def plan_for(module: nn.Module) -> Plan:
    """The plan of ``module``'s family, or the common one where the family is unknown."""
    config = getattr(module, "config", None)
    return PLANS.get(getattr(config, "family", getattr(config, "model_type", "")), DECODER)
