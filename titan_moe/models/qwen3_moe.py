"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with QK-norm, MoE in every layer, no shared expert."""

from dataclasses import dataclass
from typing import ClassVar

from titan_moe.models.spec import AttentionSpec, ModelConfig
from titan_moe.moe.config import MoEConfig


@dataclass(kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """No fields beyond the common ones."""

    family: ClassVar[str] = "qwen3_moe"

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(qk_norm=True)


FLAVORS = {
    "debug": Qwen3MoeConfig(
        vocab_size=264,
        dim=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        moe=MoEConfig(dim=128, hidden_dim=128, num_experts=8, top_k=2),
    ),
    "30b_a3b": Qwen3MoeConfig(
        vocab_size=151936,
        dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_dim=6144,
        rope_theta=1e6,
        max_seq_len=40960,
        moe=MoEConfig(dim=2048, hidden_dim=768, num_experts=128, top_k=8),
    ),
    "235b_a22b": Qwen3MoeConfig(
        vocab_size=151936,
        dim=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        ffn_dim=12288,
        rope_theta=1e6,
        max_seq_len=40960,
        moe=MoEConfig(dim=4096, hidden_dim=1536, num_experts=128, top_k=8),
    ),
}
