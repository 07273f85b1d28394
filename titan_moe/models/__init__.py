"""Model families: one file each, plain modules, built by name on any device.

Configs are here at once; modules load on first use, so that a plan or a check does not wait for torch.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from titan_moe.errors import ConfigError, nearest
from titan_moe.models import deepseek_v3, glm4_moe, gpt_oss, minimax_m2, mixtral, qwen2_moe, qwen3_moe
from titan_moe.models.spec import ModelConfig, override_config

if TYPE_CHECKING:
    from titan_moe.models.base import Decoder

_HOMES = {
    "Decoder": "base",
    "init_parameters": "init",
    "Losses": "loss",
    "cross_entropy_sum": "loss",
    "token_losses": "loss",
}

__all__ = [
    "FAMILIES",
    "Decoder",
    "Family",
    "Losses",
    "ModelConfig",
    "build",
    "config",
    "cross_entropy_sum",
    "from_config",
    "init_parameters",
    "token_losses",
]


@dataclass(frozen=True)
class Family:
    """A model family: the configs of its published sizes."""

    flavors: dict[str, ModelConfig]


FAMILIES = {
    "deepseek_v3": Family(deepseek_v3.FLAVORS),
    "kimi_k2": Family(deepseek_v3.KIMI_K2_FLAVORS),
    "qwen2_moe": Family(qwen2_moe.FLAVORS),
    "qwen3_moe": Family(qwen3_moe.FLAVORS),
    "mixtral": Family(mixtral.FLAVORS),
    "gpt_oss": Family(gpt_oss.FLAVORS),
    "glm4_moe": Family(glm4_moe.FLAVORS),
    "minimax_m2": Family(minimax_m2.FLAVORS),
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_moe.models' has no attribute {name!r}")
    return getattr(import_module(f"titan_moe.models.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def config(family: str, flavor: str, /, **override: Any) -> ModelConfig:
    """The config of a published size, with fields of it or of its MoEConfig overridden.

    Raises:
        ConfigError: on an unknown family, flavor or field, a wrong type, or sizes that do not fit together.
    """
    if family not in FAMILIES:
        raise ConfigError(f"model.name = {family!r}: unknown family.{nearest(family, FAMILIES)}")
    flavors = FAMILIES[family].flavors
    if flavor not in flavors:
        raise ConfigError(f"model.flavor = {flavor!r}: unknown flavor of {family}.{nearest(flavor, flavors)}")
    return override_config(flavors[flavor], override)


def from_config(model_config: ModelConfig, *, seed: int | None = 0) -> "Decoder":
    """The model of a config, on the current default device and dtype.

    Args:
        model_config: of any family.
        seed: of the initial weights; None leaves them uninitialised, for weights that are about to be loaded.
            Buffers are set in any case. On meta nothing is initialised.
    """
    import torch

    from titan_moe.models.base import Decoder
    from titan_moe.models.init import init_parameters

    device = torch.get_default_device()
    with torch.device("meta"):
        model = Decoder(model_config)
    if device.type == "meta":
        return model
    model.to_empty(device=device)
    if seed is not None:
        init_parameters(model, seed)
    else:
        for buffer in model.buffers():
            buffer.zero_()
    return model


def build(family: str, flavor: str, /, *, seed: int = 0, **override: Any) -> "Decoder":
    """A model by name, on the current default device and dtype; on meta without values.

    Args:
        family: a key of ``FAMILIES``.
        flavor: a size of that family, such as ``"debug"``.
        seed: of the initial weights.
        **override: fields of the family's config or of MoEConfig, such as ``num_experts=16``.

    Raises:
        ConfigError: see ``config``.
    """
    return from_config(config(family, flavor, **override), seed=seed)
