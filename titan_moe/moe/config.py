"""What an MoE layer is, as data."""

from dataclasses import dataclass
from typing import Literal

from titan_moe.errors import ConfigError


@dataclass
class MoEConfig:
    """Every variant of the layer. Sizes are counts of elements; coefficients are dimensionless.

    Raises:
        ConfigError: on a combination that cannot work, with the value, the rule and the way out.
    """

    dim: int
    """Model dim D."""
    hidden_dim: int
    """Hidden dim F of one expert."""
    num_experts: int
    """Experts E."""
    top_k: int
    """Experts K per token."""

    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Logits to scores, over all experts."""
    normalize_weights: bool = True
    """Weights of the selected experts sum to 1 (softmax: softmax over the selected logits)."""
    route_scale: float = 1.0
    """Factor on the weights, after normalising."""
    router_bias: bool = False
    """A bias term of the router's linear layer (GPT-OSS)."""
    selection: Literal["top_k", "expert_choice", "sinkhorn", "round_robin"] = "top_k"
    """How experts are chosen; round_robin (forced balance) is for benchmarks."""
    expert_bias: bool = False
    """Selection bias per expert, updated without a loss (DeepSeek-V3)."""
    bias_update_speed: float = 1e-3
    """Step u of the expert bias per optimizer step."""
    num_groups: int = 1
    """Groups G of experts for group-limited routing; 1 switches it off."""
    topk_groups: int = 1
    """Groups kept per token."""
    group_score_k: int = 2
    """A group's score is the sum of its best group_score_k scores (DeepSeek-V3: 2, V2: 1)."""
    group_mask: Literal["-inf", "zero"] = "-inf"
    """Score of experts outside the kept groups; 'zero' is what Hugging Face does for DeepSeek-V2."""
    jitter: float = 0.0
    """Training only: the router's input is multiplied by uniform noise in [1 - jitter, 1 + jitter]."""
    router_dtype: Literal["float32", "float64"] = "float32"
    """Least dtype of the router's weight and maths."""

    aux_loss_coef: float = 0.0
    """Load-balancing loss per micro-batch."""
    seq_aux_loss_coef: float = 0.0
    """Load-balancing loss per sequence; independent of how sequences are split into micro-batches."""
    global_aux_loss_coef: float = 0.0
    """Load-balancing loss over the whole step so far."""
    z_loss_coef: float = 0.0
    """Mean squared logsumexp of the logits."""

    capacity_factor: float | None = None
    """An expert takes at most ceil(T K / E x factor) tokens per rank; None: no token is dropped."""
    drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens stay: the highest weights, or the first ones."""
    pad_to_capacity: bool = False
    """Fill every expert to its capacity, so that shapes are static."""
    pad_counts_to: int = 1
    """Round each expert's token count up to a multiple by zero-weight tokens (16 fp8, 32 mxfp8)."""

    activation: Literal["swiglu", "geglu", "relu2", "clamped_swiglu"] = "swiglu"
    """Expert activation; relu2 has no gate."""
    activation_limit: float = 7.0
    """Clamp of clamped_swiglu (GPT-OSS)."""
    activation_alpha: float = 1.702
    """Slope inside the sigmoid of clamped_swiglu."""
    expert_linear_bias: bool = False
    """Biases on both expert linears."""
    weight_on: Literal["activation", "input"] = "activation"
    """Where the routing weight multiplies: before the second linear, or the expert's input (Llama 4)."""
    shared_hidden_dim: int = 0
    """Hidden dim of the shared expert; 0: none."""
    shared_gate: bool = False
    """Scale the shared expert by sigmoid(x w) (Qwen2-MoE)."""
    latent_dim: int | None = None
    """LatentMoE: routed experts work in this dim, between a down- and an up-projection."""

    experts: Literal["grouped", "sequential"] = "grouped"
    """'grouped': one grouped product; 'sequential': a loop over experts, the slow oracle."""
    dispatcher: Literal["local"] = "local"
    """How tokens reach their experts."""

    @property
    def expert_dim(self) -> int:
        """Dim of an expert's input and output."""
        return self.latent_dim or self.dim

    @property
    def gated(self) -> bool:
        """Whether the first linear has a gate and an up half."""
        return self.activation != "relu2"

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1.")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k = {self.top_k} is more than num_experts = {self.num_experts}. "
                f"Set top_k to at most {self.num_experts}."
            )
