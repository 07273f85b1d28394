"""Plugins: small objects that change any module, found by name and applied in an explicit order.

A plugin has ``name``, ``validate(config)`` (raises :class:`~titan_moe.errors.ConfigError` before any process
group exists) and ``apply(model, context) -> model``, which must raise
:class:`~titan_moe.errors.MatchedNothing` when it found nothing to change: a plugin that silently does nothing is a
fault. Under pipeline parallelism it is one when no stage has anything for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from titan_moe.config.job import JobConfig
from titan_moe.distributed import gather_objects
from titan_moe.errors import ConfigError, MatchedNothing, nearest


@dataclass(eq=False)
class PluginContext:
    """What a plugin may look at: the resolved configuration and where the model runs. One for all parts of a model."""

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
    from titan_moe.plugins import offload, recompute

    register(recompute.PLUGIN)
    register(offload.PLUGIN)
    names = list(config.plugins.use)
    if config.activation_checkpoint.mode != "none" and "recompute" not in names:
        # What it changes is then for others to see.
        names.insert(0, "recompute")
    if config.activation_offload.targets and "offload" not in names:
        names.append("offload")
    for name in names:
        if name not in _REGISTRY:
            raise ConfigError(f"plugins.use: unknown plugin {name!r}.{nearest(name, _REGISTRY)}")
        if names.count(name) > 1:
            raise ConfigError(f"plugins.use: {name!r} is given twice. Name each plugin once.")
    plugins = [_REGISTRY[name] for name in names]
    for plugin in plugins:
        plugin.validate(config)
    return plugins


class Application:
    """Chosen plugins, applied to one part of a model after another."""

    def __init__(self, plugins: Sequence[Plugin], context: PluginContext) -> None:
        self._plugins, self._context = plugins, context
        self._matched: set[str] = set()
        self._idle: dict[str, MatchedNothing] = {}

    def apply(self, module: nn.Module) -> nn.Module:
        """``module`` after all plugins, in their order."""
        for plugin in self._plugins:
            try:
                module = plugin.apply(module, self._context)
            except MatchedNothing as error:
                # Other stages may have what it looks for, on other ranks: finish decides.
                self._idle[plugin.name] = error
            else:
                self._matched.add(plugin.name)
        return module

    def finish(self) -> None:
        """To be called on every rank once all parts are done.

        Raises:
            MatchedNothing: a plugin changed no part of the model, on any rank.
        """
        matched = set().union(*gather_objects(self._matched))
        for name, error in self._idle.items():
            if name not in matched:
                raise error
