"""Activation recompute (report section 4.1.4): whole layers, single operators, or named parts of layers.

- ``full``: each layer runs again; its input is all that is kept.
- ``selective``: each layer runs again, but the results of costly operators are kept.
- ``targets``: the named parts run again, one by one, and their results are not kept either; see ``regions.py``. What
  each saves and costs is in docs/memory.md.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from titan_moe.config import model_overrides
from titan_moe.config.job import JobConfig
from titan_moe.errors import ConfigError, MatchedNothing, TrainingError
from titan_moe.models import ModelConfig, from_config
from titan_moe.models import config as model_config
from titan_moe.modules import wrap
from titan_moe.plugins import PluginContext
from titan_moe.plugins.regions import Region
from titan_moe.plugins.saved import saved_tensors
from titan_moe.plugins.targets import RECOMPUTE, Match, check_all_matched, check_targets, find, outermost

_KEY = "activation_checkpoint.targets"
# They draw no random numbers, so the generators' states need not be kept.
_DETERMINISTIC = {"layernorm", "qk_norm", "mla_up_proj", "core_attn", "moe_act"}


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The children of the model's ``ModuleList``/``ModuleDict`` containers."""
    return [
        layer
        for container in model.children()
        if isinstance(container, nn.ModuleList | nn.ModuleDict)
        for layer in container.children()
    ]


def recompute_layers(model: nn.Module, context_fn: Callable[[], Any] | None = None) -> int:
    """Recompute every layer; returns how many. Names stay as they are: only ``forward`` is replaced.

    Args:
        model: changed in place.
        context_fn: contexts of the first run and the second, as ``torch.utils.checkpoint.checkpoint`` takes them.
    """
    layers = layers_of(model)
    keywords = {} if context_fn is None else {"context_fn": context_fn}
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **keywords)
    return len(layers)


def recompute_targets(model: nn.Module, targets: Sequence[str]) -> list[Match]:
    """Recompute the named parts of ``model``, in place; what lies within another is part of that one.

    Args:
        model: the root: what is outside of it keeps what it saves.
        targets: names of ``RECOMPUTE``, or patterns of module names.

    Returns:
        the parts.
    """
    layers, saved = {id(layer) for layer in layers_of(model)}, saved_tensors(model)
    matches = list(outermost(find(model, targets, RECOMPUTE)))
    for match in matches:
        region = Region(
            match.name,
            saved,
            discard=id(match.module) not in layers,
            repeats_communication=match.target == "moe",
            draws=match.target not in _DETERMINISTIC,
        )
        wrap(match.module, match.method, region.around)
    return matches


def costly_operators() -> Callable[[], Any]:
    """The ``context_fn`` of ``selective``: results of attention, collectives and every second product are kept."""
    aten = torch.ops.aten
    always = {
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops._c10d_functional.wait_tensor.default,
    }
    # Not those over groups: experts change their results in place, and what is kept must stay.
    every_second = {aten.mm.default, aten.addmm.default, aten.bmm.default}

    def contexts() -> tuple[_Kept, _Kept]:
        first = _Kept(always, every_second)
        return first, _Kept(always, every_second, first)

    return contexts


class _Kept(TorchDispatchMode):
    """Keeps results of operators in a layer's first run, and stands in for them in a later one.

    torch's own pair of modes wants to see every operator twice, in the same order, and once more never. But FSDP
    within a layer gathers only what is not there, and schedules that split the backward pass run a layer in each half.
    """

    def __init__(self, always: Collection[Any], every_second: Collection[Any], first: "_Kept | None" = None) -> None:
        super().__init__()
        self.always, self.every_second, self.first = always, every_second, first
        self.results: dict[tuple[Any, int], Any] = {}

    def __enter__(self) -> "_Kept":
        self.counts: Counter[Any] = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.every_second:
            self.counts["products"] += 1
            keep = self.counts["products"] % 2 == 1
        else:
            keep = func in self.always
        if not keep:
            return func(*args, **(kwargs or {}))
        place = func, self.counts[func]
        self.counts[func] += 1
        if self.first is not None:
            return tree_map_only(_Unchanged, _Unchanged.get, self.first.results[place])
        result = func(*args, **(kwargs or {}))
        self.results[place] = tree_map_only(Tensor, _Unchanged, result)
        return result


class _Unchanged:
    """A tensor that nobody may change in place, apart from the graph that it belongs to."""

    def __init__(self, tensor: Tensor) -> None:
        # A view that is made under autograd shares the count of changes only if asked to.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.tensor = tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise TrainingError(
                f"a result of shape {list(self.tensor.shape)} that activation_checkpoint.mode = 'selective' keeps was "
                "changed in place. Use mode 'full' or 'targets'."
            )
        return self.tensor.detach()


class Recompute:
    """``activation_checkpoint.mode``; ``[plugins] use = ["recompute"]`` with mode ``none`` is ``full``."""

    name = "recompute"

    def validate(self, config: JobConfig) -> None:
        """Refuse targets that are not known, or that the model has nothing of."""
        targets = config.activation_checkpoint.targets
        if config.activation_checkpoint.mode == "selective" and config.compile.enable:
            raise ConfigError(
                "activation_checkpoint.mode = 'selective' with compile.enable: operators are kept one by one, and a "
                "compiled layer calls none. Use mode 'targets', or 'full'."
            )
        if targets:
            check_targets(_KEY, targets, RECOMPUTE)
            check_all_matched(_KEY, targets, find(model_on_meta(config), targets, RECOMPUTE))

    def apply(self, model: nn.Module, context: PluginContext) -> nn.Module:
        """Change ``model``, all of it or a pipeline's stage, in place.

        Raises:
            MatchedNothing: there is none of what is to run again here.
        """
        config = context.config.activation_checkpoint
        if config.mode == "targets":
            if not recompute_targets(model, config.targets):
                raise MatchedNothing(f"{_KEY} = {config.targets} matched nothing in any stage. Name other parts.")
        elif recompute_layers(model, costly_operators() if config.mode == "selective" else None) == 0:
            raise MatchedNothing(
                "plugin 'recompute' matched nothing in any stage: the model has no ModuleList or ModuleDict of layers."
            )
        return model


def model_on_meta(config: JobConfig) -> nn.Module:
    """The whole model of a configuration, without storage."""
    with torch.device("meta"):
        return from_config(_model_config(config))


def _model_config(config: JobConfig) -> ModelConfig:
    return model_config(config.model.name, config.model.flavor, **model_overrides(config))


PLUGIN = Recompute()
