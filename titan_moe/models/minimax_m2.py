"""MiniMax-M2: grouped-query attention with norms over all heads at once, sigmoid routing with a selection bias."""

from dataclasses import dataclass
from typing import ClassVar

from titan_moe.errors import ConfigError
from titan_moe.models.spec import AttentionSpec, ModelConfig
from titan_moe.moe.config import MoEConfig


@dataclass(kw_only=True)
class MiniMaxM2Config(ModelConfig):
    """MiniMax-M2's fields."""

    family: ClassVar[str] = "minimax_m2"

    rotary_dims: int
    """Leading dims of a head that rotate."""

    def __post_init__(self) -> None:
        self.at_least(1, "rotary_dims")
        if self.rotary_dims > self.head_dim:
            raise ConfigError(
                f"rotary_dims = {self.rotary_dims} is more than head_dim = {self.head_dim}. Set it to at most that."
            )
        super().__post_init__()

    @property
    def rotary_dim(self) -> int:
        return self.rotary_dims

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(qk_norm=True, norm_over_heads=True)


FLAVORS = {
    "debug": MiniMaxM2Config(
        vocab_size=264,
        dim=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        rotary_dims=32,
        moe=MoEConfig(dim=128, hidden_dim=128, num_experts=8, top_k=2, score_function="sigmoid", expert_bias=True),
    ),
    "230b_a10b": MiniMaxM2Config(
        vocab_size=200064,
        dim=3072,
        num_layers=62,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        rotary_dims=64,
        rope_theta=5e6,
        max_seq_len=196608,
        moe=MoEConfig(dim=3072, hidden_dim=1536, num_experts=256, top_k=8, score_function="sigmoid", expert_bias=True),
    ),
}
