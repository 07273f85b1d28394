"""Qwen2-MoE (arXiv 2407.10671, section 2.2.2): fine experts beside a gated shared expert, biased projections."""

from dataclasses import dataclass
from typing import ClassVar

from titan_moe.models.spec import AttentionSpec, ModelConfig
from titan_moe.moe.config import MoEConfig


@dataclass(kw_only=True)
class Qwen2MoeConfig(ModelConfig):
    """Qwen2-MoE's fields."""

    family: ClassVar[str] = "qwen2_moe"

    qkv_bias: bool = True
    """Biases on the query, key and value projections."""

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(qkv_bias=self.qkv_bias)


FLAVORS = {
    "debug": Qwen2MoeConfig(
        vocab_size=264,
        dim=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        moe=MoEConfig(
            dim=128,
            hidden_dim=128,
            num_experts=8,
            top_k=2,
            normalize_weights=False,
            shared_hidden_dim=256,
            shared_gate=True,
        ),
    ),
    # Qwen1.5-MoE-A2.7B.
    "14b_a2.7b": Qwen2MoeConfig(
        vocab_size=151936,
        dim=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        ffn_dim=5632,
        rope_theta=1e6,
        max_seq_len=8192,
        moe=MoEConfig(
            dim=2048,
            hidden_dim=1408,
            num_experts=60,
            top_k=4,
            normalize_weights=False,
            shared_hidden_dim=5632,
            shared_gate=True,
        ),
    ),
    "57b_a14b": Qwen2MoeConfig(
        vocab_size=151936,
        dim=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        ffn_dim=18944,
        rope_theta=1e6,
        max_seq_len=131072,
        moe=MoEConfig(
            dim=3584,
            hidden_dim=2560,
            num_experts=64,
            top_k=8,
            normalize_weights=False,
            shared_hidden_dim=20480,
            shared_gate=True,
        ),
    ),
}
