"""GPT-OSS (arXiv 2508.10925): attention sinks, every other layer with a sliding window, biases, clamped SwiGLU."""

from dataclasses import dataclass
from typing import ClassVar

from titan_moe.models.spec import AttentionSpec, ModelConfig
from titan_moe.moe.config import MoEConfig


@dataclass(kw_only=True)
class GptOssConfig(ModelConfig):
    """GPT-OSS's fields."""

    family: ClassVar[str] = "gpt_oss"

    sliding_window: int = 128
    """Positions each token attends to in a windowed layer, itself included."""
    full_attention_every: int = 2
    """Layers 1, 3, 5, ... see the whole past with 2; the others have the window."""

    def __post_init__(self) -> None:
        self.at_least(1, "sliding_window", "full_attention_every")
        super().__post_init__()

    def attention(self, layer: int) -> AttentionSpec:
        full = (layer + 1) % self.full_attention_every == 0
        window = None if full else self.sliding_window
        return AttentionSpec(qkv_bias=True, out_bias=True, window=window, sinks=True)


def _moe(dim: int, hidden_dim: int, num_experts: int, top_k: int) -> MoEConfig:
    return MoEConfig(
        dim=dim,
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        top_k=top_k,
        router_bias=True,
        activation="clamped_swiglu",
        expert_linear_bias=True,
    )


def _published(num_layers: int, num_experts: int) -> GptOssConfig:
    return GptOssConfig(
        vocab_size=201088,
        dim=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        max_seq_len=131072,
        moe=_moe(2880, 2880, num_experts, 4),
    )


FLAVORS = {
    "debug": GptOssConfig(
        vocab_size=264,
        dim=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        norm_eps=1e-5,
        moe=_moe(128, 128, 8, 2),
    ),
    "20b": _published(num_layers=24, num_experts=32),
    "120b": _published(num_layers=36, num_experts=128),
}
