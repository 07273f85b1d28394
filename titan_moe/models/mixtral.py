"""Mixtral (arXiv 2401.04088): grouped-query attention, eight large experts, top-2."""

from dataclasses import dataclass
from typing import ClassVar

from titan_moe.models.spec import AttentionSpec, ModelConfig
from titan_moe.moe.config import MoEConfig


@dataclass(kw_only=True)
class MixtralConfig(ModelConfig):
    """Mixtral's fields."""

    family: ClassVar[str] = "mixtral"

    sliding_window: int | None = None
    """Positions each token attends to, itself included; None: all earlier ones."""

    def __post_init__(self) -> None:
        self.at_least(1, "sliding_window")
        super().__post_init__()

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(window=self.sliding_window)


FLAVORS = {
    "debug": MixtralConfig(
        vocab_size=264,
        dim=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        norm_eps=1e-5,
        moe=MoEConfig(dim=128, hidden_dim=128, num_experts=8, top_k=2),
    ),
    "8x7b": MixtralConfig(
        vocab_size=32000,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=1e6,
        max_seq_len=32768,
        moe=MoEConfig(dim=4096, hidden_dim=14336, num_experts=8, top_k=2),
    ),
    "8x22b": MixtralConfig(
        vocab_size=32000,
        dim=6144,
        num_layers=56,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=1e6,
        max_seq_len=65536,
        moe=MoEConfig(dim=6144, hidden_dim=16384, num_experts=8, top_k=2),
    ),
}
