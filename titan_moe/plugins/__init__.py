"""Plugins: small objects that change any module, found by name and applied in an explicit order.

A plugin has ``name``, ``validate(config)`` (raises :class:`~titan_moe.errors.ConfigError` before any process
group exists) and ``apply(model, context) -> model``, which must raise when it matched nothing: a plugin that
silently does nothing is a fault.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from titan_moe.config.job import JobConfig
from titan_moe.errors import ConfigError, nearest


@dataclass
class PluginContext:
    """What a plugin may look at: the resolved configuration and where the model runs."""

    config: JobConfig
    device: torch.device


class Plugin(Protocol):
    """The three members that a plugin has; no base class is needed."""

    name: str

    def validate(self, config: JobConfig) -> None: ...

    def apply(self, model: nn.Module, context: PluginContext) -> nn.Module: ...


_REGISTRY: dict[str, Any] = {}


def register(plugin: Plugin) -> Plugin:
    """Make ``plugin`` known by its name, for ``[plugins] use``.

    Raises:
        ConfigError: another plugin has that name.
    """
    if plugin.name in _REGISTRY and _REGISTRY[plugin.name] is not plugin:
        raise ConfigError(f"plugin {plugin.name!r} is registered twice. Give one of them another name.")
    _REGISTRY[plugin.name] = plugin
    return plugin


def chosen(config: JobConfig) -> list[Plugin]:
    """The plugins of ``plugins.use`` in their order, each validated against ``config``.

    Raises:
        ConfigError: an unknown name, a name given twice, or what a plugin refuses.
    """
    from titan_moe.plugins import recompute

    register(recompute.PLUGIN)
    names = list(config.plugins.use)
    if config.activation_checkpoint.mode == "full" and "recompute" not in names:
        names.append("recompute")
    for name in names:
        if name not in _REGISTRY:
            raise ConfigError(f"plugins.use: unknown plugin {name!r}.{nearest(name, _REGISTRY)}")
        if names.count(name) > 1:
            raise ConfigError(f"plugins.use: {name!r} is given twice. Name each plugin once.")
    plugins = [_REGISTRY[name] for name in names]
    for plugin in plugins:
        plugin.validate(config)
    return plugins
