"""What an MoE layer is, as data."""

import math
from dataclasses import dataclass
from typing import Literal

from titan_moe.config.types import check_types
from titan_moe.errors import ConfigError

MAX_PAD_COUNTS_TO = 65536


@dataclass
class MoEConfig:
    """Every variant of the layer. Sizes are counts of elements; coefficients are dimensionless.

    Raises:
        ConfigError: on a wrong type or a combination that cannot work, with the value, the rule and the way out.
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
    save: Literal["preact", "input", "preact_fp8"] = "preact"
    """What grouped experts keep beside their input for backward: the pre-activation, nothing (their first linear runs
    again), or the pre-activation in FP8, within 2^-4 of each value (gradients are then approximate)."""
    dispatcher: Literal["local", "allgather", "alltoall", "deepep", "hybridep"] = "local"
    """How tokens reach their experts."""
    recv_capacity_factor: float | None = None
    """With experts spread over ranks: bound on the rows that a rank receives (alltoall: from each rank), over those of
    even routing, so that no shape depends on the routing; None: as many as there are. No token is dropped: a caller
    has to repeat what passed the bound (``titan_moe.moe.bound``)."""

    @property
    def expert_dim(self) -> int:
        """Dim of an expert's input and output."""
        return self.latent_dim or self.dim

    @property
    def gated(self) -> bool:
        """Whether the first linear has a gate and an up half."""
        return self.activation != "relu2"

    @property
    def balancing_coefs(self) -> list[str]:
        """Names of the balancing losses that are on."""
        names = ("aux_loss_coef", "seq_aux_loss_coef", "global_aux_loss_coef")
        return [name for name in names if getattr(self, name)]

    @property
    def reshapes_selection(self) -> bool:
        """Whether bias or group limits make the choice differ from the plain top-k of the scores."""
        return self.expert_bias or self.num_groups > 1

    def __post_init__(self) -> None:
        self._check_values()
        self._check_selection()
        self._check_slots()
        if self.shared_gate and not self.shared_hidden_dim:
            raise ConfigError("shared_gate = True without a shared expert. Set shared_hidden_dim.")

    def _check_values(self) -> None:
        """Each field by itself."""
        check_types(self)
        for name in ("dim", "hidden_dim", "num_experts", "top_k", "num_groups", "topk_groups", "group_score_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1.")
        if not 1 <= self.pad_counts_to <= MAX_PAD_COUNTS_TO:
            raise ConfigError(
                f"pad_counts_to = {self.pad_counts_to}: must be from 1, which pads nothing, to {MAX_PAD_COUNTS_TO}."
            )
        if self.latent_dim is not None and self.latent_dim < 1:
            raise ConfigError(f"latent_dim = {self.latent_dim}: must be at least 1. Leave it out for no latent dim.")
        if self.shared_hidden_dim < 0:
            raise ConfigError(f"shared_hidden_dim = {self.shared_hidden_dim}: must be 0 (no shared expert) or more.")
        coefs = ("aux_loss_coef", "seq_aux_loss_coef", "global_aux_loss_coef", "z_loss_coef", "bias_update_speed")
        for name in coefs:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be finite and at least 0; 0 switches it off.")
        for name in ("route_scale", "activation_limit", "activation_alpha"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be finite and more than 0.")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter = {self.jitter}: must be in [0, 1); 0 switches it off, 0.01 is usual.")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ConfigError(
                f"capacity_factor = {self.capacity_factor}: must be finite and more than 0. Leave it out to drop none."
            )
        factor = self.recv_capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            raise ConfigError(
                f"recv_capacity_factor = {factor}: must be finite and more than 0. Leave it out for no bound."
            )

    def _check_selection(self) -> None:
        """Fields that decide which experts are chosen."""
        E, K, G = self.num_experts, self.top_k, self.num_groups
        if K > E:
            raise ConfigError(f"top_k = {K} is more than num_experts = {E}. Set top_k to at most {E}.")
        if E % G:
            near = [g for g in range(1, E + 1) if E % g == 0]
            raise ConfigError(
                f"num_groups = {G} does not divide num_experts = {E}. "
                f"Set num_groups to {min(near, key=lambda g: abs(g - G))}."
            )
        if self.topk_groups > G:
            raise ConfigError(
                f"topk_groups = {self.topk_groups} is more than num_groups = {G}. Set topk_groups to at most {G}."
            )
        if K > self.topk_groups * (E // G):
            raise ConfigError(
                f"top_k = {K} is more than the {self.topk_groups * (E // G)} experts in {self.topk_groups} kept groups "
                f"of {E // G}. Set topk_groups to at least {math.ceil(K / (E // G))}."
            )
        if G > 1 and self.group_score_k > E // G:
            raise ConfigError(
                f"group_score_k = {self.group_score_k} is more than a group's {E // G} experts. "
                f"Set group_score_k to at most {E // G}."
            )
        if G > 1 and self.group_mask == "zero" and self.expert_bias:
            raise ConfigError(
                "group_mask = 'zero' with expert_bias = True: a masked expert would beat a kept one whose biased score "
                "is negative. Set group_mask = '-inf'."
            )
        by_token = self.selection != "expert_choice"
        if K == 1 and by_token and self.score_function == "softmax" and self.normalize_weights:
            raise ConfigError(
                "top_k = 1 with score_function = 'softmax' and normalize_weights = True gives the constant weight 1 "
                "and no router gradient. Set normalize_weights = False."
            )
        if self.selection in ("sinkhorn", "expert_choice"):
            clash = [*self.balancing_coefs, *(["expert_bias"] if self.expert_bias else [])]
            clash += ["num_groups"] if G > 1 else []
            if clash:
                raise ConfigError(
                    f"selection = {self.selection!r} balances by itself and does not go with {', '.join(clash)}. "
                    "Switch them off or set selection = 'top_k'."
                )

    def _check_slots(self) -> None:
        """Fields that drop or add slots after the selection."""
        if self.selection == "expert_choice" and self.capacity_factor is not None:
            raise ConfigError(
                f"capacity_factor = {self.capacity_factor} with selection = 'expert_choice': every expert takes "
                "exactly ceil(T K / E) tokens already. Leave capacity_factor out and change top_k."
            )
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ConfigError("pad_to_capacity = True without a capacity. Set capacity_factor.")
        if self.save != "preact" and self.experts == "sequential":
            raise ConfigError(
                f"save = {self.save!r} with experts = 'sequential', whose plain autograd keeps everything. Set "
                "experts = 'grouped', or leave save out."
            )
        padded = self.pad_to_capacity or self.pad_counts_to > 1
        if padded and self.weight_on == "input" and self.expert_linear_bias:
            raise ConfigError(
                "weight_on = 'input' with expert_linear_bias = True and padded counts: an expert with biases maps a "
                "zero-weight row to more than 0. Set weight_on = 'activation', or pad nothing."
            )
