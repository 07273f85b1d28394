"""What a model is, as data: the config of a decoder, the choice of its attention, and how a config is overridden.

Imports no torch, so that a configuration can be read, checked and planned without waiting for it.
"""

import math
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from titan_moe.config.types import check_type
from titan_moe.errors import ConfigError, nearest
from titan_moe.moe.config import MoEConfig

if TYPE_CHECKING:
    from titan_moe.models.rope import Rotary

_YARN_KEYS = {
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
}
# YaRN's usual bounds, in turns within the original context.
BETA_FAST, BETA_SLOW = 32, 1


def check_scaling(scaling: dict[str, Any] | None) -> None:
    """Refuses a ``rope_scaling`` that would be misread.

    Raises:
        ConfigError: on an unknown type or key, a missing factor, or a value out of its range.
    """
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind != "yarn":
        raise ConfigError(
            f"rope_scaling.rope_type = {kind!r}: must be 'yarn'. Leave rope_scaling unset for plain RoPE."
        )
    for key in scaling:
        if key not in _YARN_KEYS:
            raise ConfigError(f"rope_scaling.{key}: unknown key.{nearest(key, _YARN_KEYS)}")
    for key in ("factor", "original_max_position_embeddings"):
        if not _number(scaling.get(key), 1):
            raise ConfigError(f"rope_scaling.{key} = {scaling.get(key)!r}: YaRN needs a finite number of at least 1.")
    # None stands for the default, as in published configs.
    given = {key: value for key, value in scaling.items() if value is not None}
    for key in ("beta_fast", "beta_slow", "attention_factor"):
        if key in given and not _number(given[key], sys.float_info.min):
            raise ConfigError(
                f"rope_scaling.{key} = {given[key]!r}: must be a finite number above 0. Leave it out for the default."
            )
    for key in ("mscale", "mscale_all_dim"):
        if key in given and not _number(given[key], 0):
            raise ConfigError(
                f"rope_scaling.{key} = {given[key]!r}: must be a finite number of at least 0; 0 switches it off."
            )
    if not isinstance(given.get("truncate", True), bool):
        raise ConfigError(f"rope_scaling.truncate = {given['truncate']!r}: must be true or false (bool).")
    fast, slow = given.get("beta_fast", BETA_FAST), given.get("beta_slow", BETA_SLOW)
    if fast < slow:
        raise ConfigError(
            f"rope_scaling.beta_fast = {fast} is less than beta_slow = {slow}: dims that turn fast keep their "
            "frequency. Swap the two."
        )


def _number(value: Any, least: float) -> bool:
    """Whether ``value`` is a finite number of at least ``least``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= sys.float_info.max


@dataclass(frozen=True)
class AttentionSpec:
    """Which attention a layer has; the sizes are the model's."""

    latent: bool = False
    """Multi-head latent attention; the other fields are then unused."""
    qkv_bias: bool = False
    """Biases on the three input projections."""
    out_bias: bool = False
    """Bias on the output projection."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys."""
    norm_over_heads: bool = False
    """That norm is one over all heads together."""
    window: int | None = None
    """Positions each token attends to, itself included; None: the whole past."""
    sinks: bool = False
    """One learned sink logit per head."""


@dataclass(kw_only=True)
class ModelConfig:
    """Sizes and constants of a decoder. Families add their own fields.

    Raises:
        ConfigError: on a combination that cannot work.
    """

    family: ClassVar[str]
    derived: ClassVar[dict[str, str]] = {}
    """Fields that follow from others, with the names of those: not given, and an override has to agree."""

    vocab_size: int
    """Rows of the embedding."""
    dim: int
    """Model dim D."""
    num_layers: int
    """Decoder layers, without MTP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key-value heads; divides num_heads."""
    head_dim: int
    """Dims of one head."""
    ffn_dim: int = 0
    """Hidden dim of the dense feed-forward in the leading layers."""
    num_dense_layers: int = 0
    """Leading layers with a dense feed-forward in place of MoE."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: dict[str, Any] | None = None
    """YaRN: rope_type = 'yarn', factor, original_max_position_embeddings, and its optional keys."""
    max_seq_len: int = 4096
    """Longest sequence, in tokens."""
    tie_embeddings: bool = False
    """The head is the embedding, transposed."""
    mtp_depth: int = 0
    """Multi-token-prediction depths; each predicts one more token ahead, in training."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean loss over MTP depths."""
    mtp_own_embeddings: bool = False
    """Give each MTP depth an embedding and a head of its own."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    moe: MoEConfig
    """The MoE layers."""

    def __post_init__(self) -> None:
        self.at_least(1, "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_seq_len")
        self.at_least(0, "ffn_dim", "num_dense_layers", "mtp_depth")
        for name, above, least, usual in (
            ("norm_eps", True, 0, "1e-6 is usual"),
            ("rope_theta", True, 1, "10000 is usual"),
            ("init_std", False, 0, "0.02 is usual"),
            ("mtp_loss_weight", False, 0, "0 switches the loss off"),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf or (above and value == least):
                rule = f"more than {least}" if above else f"at least {least}"
                raise ConfigError(f"{name} = {value}: must be finite and {rule}; {usual}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}. Set it to a divisor."
            )
        if self.num_dense_layers > self.num_layers:
            raise ConfigError(
                f"num_dense_layers = {self.num_dense_layers} is more than num_layers = {self.num_layers}. "
                f"Set num_dense_layers to at most {self.num_layers}."
            )
        if self.num_dense_layers and self.ffn_dim < 1:
            raise ConfigError(f"ffn_dim = {self.ffn_dim}: dense layers need a hidden dim of at least 1.")
        if self.moe.dim != self.dim:
            raise ConfigError(f"moe.dim = {self.moe.dim} differs from dim = {self.dim}. Set both to the same value.")
        check_scaling(self.rope_scaling)
        if self.rotary_dim % 2:
            raise ConfigError(f"{self.rotary_dim} rotary dims: must be even. Change the head dim.")

    def at_least(self, least: int, *names: str) -> None:
        """Raises ConfigError if one of these fields is set below ``least``."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value}: must be at least {least}.")

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that rotate."""
        return self.head_dim

    def rotary(self) -> "Rotary":
        """The rotation of queries and keys."""
        from titan_moe.models.rope import Rotary

        return Rotary(self.rotary_dim, self.rope_theta, self.rope_scaling, head_dim=self.head_dim)

    def attention(self, layer: int) -> AttentionSpec:
        """The attention of layer ``layer``; MTP layers count on from ``num_layers``."""
        raise AssertionError("a family defines its attention")


def override_config(config: ModelConfig, override: dict[str, Any]) -> ModelConfig:
    """A copy of ``config`` with fields of it, or of its MoE layers, replaced.

    Args:
        config: left as it is.
        override: field name to value. A name that only MoEConfig has goes there; ``dim`` goes to both.

    Raises:
        ConfigError: on an unknown name, a value of the wrong type, or a combination that cannot work.
    """
    of_model = {f.name for f in fields(config)} - {"moe"}
    of_moe = {f.name for f in fields(MoEConfig)}
    hints = {**get_type_hints(MoEConfig), **get_type_hints(type(config))}
    for name, value in override.items():
        if name not in of_model | of_moe:
            raise ConfigError(f"model.override.{name}: unknown field.{nearest(name, of_model | of_moe)}")
        check_type(f"model.override.{name}", value, hints[name])
    moe = replace(
        config.moe, **{k: v for k, v in override.items() if k in of_moe and (k not in of_model or k == "dim")}
    )
    own = {k: v for k, v in override.items() if k in of_model and k not in config.derived}
    changed = replace(config, moe=moe, **own)
    for name, sources in config.derived.items():
        if override.get(name, getattr(changed, name)) != getattr(changed, name):
            raise ConfigError(
                f"model.override.{name} = {override[name]}: follows from {sources} in {config.family} and is "
                f"{getattr(changed, name)} here. Leave it out and set {sources}."
            )
    return changed
