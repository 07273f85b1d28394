"""GLM-4.5 (arXiv 2508.06471): grouped-query attention with half-rotary heads, DeepSeek-V3's routing without groups."""

from dataclasses import dataclass
from typing import ClassVar

from titan_moe.errors import ConfigError
from titan_moe.models.spec import AttentionSpec, ModelConfig
from titan_moe.moe.config import MoEConfig


@dataclass(kw_only=True)
class Glm4MoeConfig(ModelConfig):
    """GLM-4-MoE's fields."""

    family: ClassVar[str] = "glm4_moe"

    qk_norm: bool = True
    """RMSNorm over each head of queries and keys."""
    attention_bias: bool = True
    """Biases on the query, key and value projections."""
    partial_rotary_factor: float = 0.5
    """Leading share of a head's dims that rotate."""

    def __post_init__(self) -> None:
        if not 0 < self.partial_rotary_factor <= 1:
            value = self.partial_rotary_factor
            raise ConfigError(f"partial_rotary_factor = {value}: must be a share of the head: above 0, at most 1.")
        super().__post_init__()

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(qkv_bias=self.attention_bias, qk_norm=self.qk_norm)


FLAVORS = {
    "debug": Glm4MoeConfig(
        vocab_size=264,
        dim=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        ffn_dim=384,
        num_dense_layers=1,
        norm_eps=1e-5,
        moe=MoEConfig(
            dim=128,
            hidden_dim=128,
            num_experts=8,
            top_k=2,
            score_function="sigmoid",
            route_scale=2.5,
            expert_bias=True,
            shared_hidden_dim=128,
        ),
    ),
    # mtp_depth = 1 with mtp_own_embeddings adds the published MTP layer.
    "355b_a32b": Glm4MoeConfig(
        vocab_size=151552,
        dim=5120,
        num_layers=92,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=12288,
        num_dense_layers=3,
        norm_eps=1e-5,
        rope_theta=1e6,
        max_seq_len=131072,
        moe=MoEConfig(
            dim=5120,
            hidden_dim=1536,
            num_experts=160,
            top_k=8,
            score_function="sigmoid",
            route_scale=2.5,
            expert_bias=True,
            shared_hidden_dim=1536,
        ),
    ),
}
