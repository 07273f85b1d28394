"""AdamW over a model's parameters, with weight decay on matrices only."""

import re

import torch
from torch import nn

from titan_moe.config.job import Optimizer as OptimizerConfig
from titan_moe.errors import ConfigError

_BIAS = re.compile(r"(^|[._])(bias|b\d+)$")


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to every parameter of two or more dims that is not a bias.

    The biases of stacked experts are matrices in shape only (``b1 [E, n, F]``), so the last part of the name
    decides: ``bias``, ``…_bias``, ``b1``, ``b2``. Norms, sinks and plain biases have one dim.
    """
    return parameter.ndim >= 2 and _BIAS.search(name) is None


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, plain or DTensor, in at most two groups: decayed and not.

    Raises:
        ConfigError: for a hyper-parameter outside its range, or a model with nothing to train.
    """
    _validate(config)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no parameter with requires_grad: there is nothing to train")
    groups = []
    for weight_decay, decayed in ((config.weight_decay, True), (0.0, False)):
        members = [parameter for name, parameter in trainable if decays(name, parameter) == decayed]
        if members:
            groups.append({"params": members, "weight_decay": weight_decay})
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=config.implementation == "foreach",
        fused=config.implementation == "fused",
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _validate(config: OptimizerConfig) -> None:
    for name in ("beta1", "beta2"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"optimizer.{name} = {value!r}: must be at least 0 and less than 1")
    for name in ("lr", "eps", "weight_decay"):
        value = getattr(config, name)
        if not 0 <= value < float("inf"):
            raise ConfigError(f"optimizer.{name} = {value!r}: must be a finite number, 0 or more")
