"""Activation recompute (report section 4.1.4): each decoder layer runs again in the backward pass."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from titan_moe.config.job import JobConfig
from titan_moe.errors import MatchedNothing
from titan_moe.plugins import PluginContext


def recompute_layers(model: nn.Module) -> int:
    """Recompute every child of the model's ``ModuleList``/``ModuleDict`` containers; returns how many.

    The module tree and all names stay as they are: only ``forward`` is replaced.
    """
    layers = [
        layer
        for container in model.children()
        if isinstance(container, nn.ModuleList | nn.ModuleDict)
        for layer in (container.values() if isinstance(container, nn.ModuleDict) else container)
    ]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return len(layers)


class Recompute:
    """``activation_checkpoint.mode = "full"``, or ``[plugins] use = ["recompute"]``."""

    name = "recompute"

    def validate(self, config: JobConfig) -> None:
        """Nothing to refuse: it works with every configuration."""

    def apply(self, model: nn.Module, context: PluginContext) -> nn.Module:
        """Wrap the layers in place.

        Raises:
            MatchedNothing: the model has no container of layers.
        """
        if recompute_layers(model) == 0:
            raise MatchedNothing(
                "plugin 'recompute' matched nothing in any stage: the model has no ModuleList or ModuleDict of layers."
            )
        return model


PLUGIN = Recompute()
