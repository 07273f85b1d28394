"""DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 (arXiv 2507.20534).

Multi-head latent attention, leading dense layers, one shared expert, sigmoid scores with a selection bias and
group-limited routing, multi-token prediction.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from titan_moe.models.spec import AttentionSpec, ModelConfig
from titan_moe.moe.config import MoEConfig

if TYPE_CHECKING:
    from titan_moe.models.rope import Rotary


@dataclass(kw_only=True)
class DeepseekV3Config(ModelConfig):
    """``head_dim`` and ``num_kv_heads`` follow from the fields below, and cannot be given."""

    family: ClassVar[str] = "deepseek_v3"
    derived: ClassVar[dict[str, str]] = {
        "num_kv_heads": "num_heads",
        "head_dim": "qk_nope_head_dim and qk_rope_head_dim",
    }

    num_kv_heads: int = field(init=False)
    """Always num_heads: every head has keys and values of its own, made from the latent."""
    head_dim: int = field(init=False)
    """Always qk_nope_head_dim + qk_rope_head_dim."""
    q_lora_rank: int | None = None
    """Dim of the query latent; None: queries come straight from the hidden state."""
    kv_lora_rank: int
    """Dim of the latent of keys and values."""
    qk_nope_head_dim: int
    """Dims of a query or key head without position."""
    qk_rope_head_dim: int
    """Dims of a query or key head that rotate; all heads share the key's."""
    v_head_dim: int
    """Dims of a value head."""
    rope_interleaved: bool = True
    """Rotary pairs are neighbours, as in the published weights."""

    def __post_init__(self) -> None:
        self.at_least(1, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        self.num_kv_heads = self.num_heads
        self.head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        super().__post_init__()

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(latent=True)

    def rotary(self) -> "Rotary":
        from titan_moe.models.rope import Rotary

        return Rotary(
            self.rotary_dim,
            self.rope_theta,
            self.rope_scaling,
            head_dim=self.head_dim,
            start=self.qk_nope_head_dim,
            interleaved=self.rope_interleaved,
        )


@dataclass(kw_only=True)
class KimiK2Config(DeepseekV3Config):
    """DeepSeek-V3's architecture without expert groups."""

    family: ClassVar[str] = "kimi_k2"


def _yarn(**keys: float) -> dict[str, Any]:
    return {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, **keys}


_DEBUG = {
    "vocab_size": 264,
    "dim": 128,
    "num_layers": 4,
    "num_heads": 2,
    "ffn_dim": 384,
    "num_dense_layers": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_DEBUG_MOE = {
    "dim": 128,
    "hidden_dim": 128,
    "num_experts": 8,
    "top_k": 2,
    "score_function": "sigmoid",
    "route_scale": 2.5,
    "expert_bias": True,
    "shared_hidden_dim": 128,
}

FLAVORS = {
    "debug": DeepseekV3Config(**_DEBUG, moe=MoEConfig(**_DEBUG_MOE, num_groups=4, topk_groups=2)),
    # DeepSeek-V2-Lite's shape (arXiv 2405.04434, appendix B).
    "16b": DeepseekV3Config(
        vocab_size=102400,
        dim=2048,
        num_layers=27,
        num_heads=16,
        ffn_dim=10944,
        num_dense_layers=1,
        rope_scaling=_yarn(factor=40, mscale=0.707, mscale_all_dim=0.707),
        max_seq_len=163840,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe=MoEConfig(
            dim=2048, hidden_dim=1408, num_experts=64, top_k=6, normalize_weights=False, shared_hidden_dim=2 * 1408
        ),
    ),
    # mtp_depth = 1 adds the published MTP layer.
    "671b": DeepseekV3Config(
        vocab_size=129280,
        dim=7168,
        num_layers=61,
        num_heads=128,
        ffn_dim=18432,
        num_dense_layers=3,
        rope_scaling=_yarn(factor=40, mscale=1.0, mscale_all_dim=1.0),
        max_seq_len=163840,
        init_std=0.006,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe=MoEConfig(
            dim=7168,
            hidden_dim=2048,
            num_experts=256,
            top_k=8,
            score_function="sigmoid",
            route_scale=2.5,
            expert_bias=True,
            num_groups=8,
            topk_groups=4,
            shared_hidden_dim=2048,
        ),
    ),
}

KIMI_K2_FLAVORS = {
    "debug": KimiK2Config(**_DEBUG, moe=MoEConfig(**_DEBUG_MOE)),
    "1t": KimiK2Config(
        vocab_size=163840,
        dim=7168,
        num_layers=61,
        num_heads=64,
        ffn_dim=18432,
        num_dense_layers=1,
        rope_theta=50000.0,
        rope_scaling=_yarn(factor=32, mscale=1.0, mscale_all_dim=1.0, beta_fast=1),
        max_seq_len=131072,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe=MoEConfig(
            dim=7168,
            hidden_dim=2048,
            num_experts=384,
            top_k=8,
            score_function="sigmoid",
            route_scale=2.827,
            expert_bias=True,
            shared_hidden_dim=2048,
        ),
    ),
}
