"""Activation offload (report section 4.1.5): chosen saved tensors wait on the host for their backward pass.

A tensor leaves while the modules that follow it compute, and is gone when the next layer saves the same; it returns
while the modules between run backward, asked for when the layer behind it has used up its own. So of each kind the
device holds one layer's at a time, in both passes. The last layer's stay: they are wanted at once. Compute waits for
copies on its own stream, the host for nothing. What ``recompute`` makes again does not travel; what it is made from
does.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titan_moe.config.job import JobConfig
from titan_moe.errors import ConfigError, MatchedNothing
from titan_moe.modules import modules_by_name, wrap
from titan_moe.plugins import PluginContext
from titan_moe.plugins.offloader import Offloader, Scope
from titan_moe.plugins.recompute import layers_of, model_on_meta
from titan_moe.plugins.saved import SavedTensors, plain_part, saved_tensors
from titan_moe.plugins.streams import Copies, SimulatedCopies, StreamCopies, WeightlessCopies
from titan_moe.plugins.targets import RECOMPUTE, SHARED, Match, Part, check_all_matched, check_targets, find, outermost

_KEY = "activation_offload.targets"

OFFLOAD: Mapping[str, tuple[Part, ...]] = {
    "attn_norm": (Part("**.input_layernorm"),),
    "mlp_norm": (Part("**.post_attention_layernorm"),),
    "qkv": tuple(Part(f"**.{name}") for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")),
    "core_attn": (Part("**.self_attn", "attend"),),
    "attn_proj": (Part("**.self_attn.o_proj"),),
    "attn": (Part("**.self_attn"),),
    # Of the experts, what comes in is the first linear's input, and what is made there the activation's.
    "expert_fc1": (Part("**.mlp.experts", only="inputs"),),
    "moe_act": (Part("**.mlp.experts", only="made"), *RECOMPUTE["moe_act"]),
    "mlp": RECOMPUTE["mlp"],
    "shared_expert": SHARED,
    "moe": RECOMPUTE["moe"],
}
"""What ``activation_offload.targets`` may name, besides patterns: what is saved there."""


@dataclass
class _Around:
    """Opens a scope around one method."""

    offloader: Offloader
    saved: SavedTensors
    stage: int
    kind: str
    only: str | None
    layer: int
    stays: bool

    def __call__(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # What a compiled layer saves belongs to none of its parts, so this one runs as it is written.
            return _as_written(self._open, inner, *args, **kwargs)
        return self._open(inner, *args, **kwargs)

    def _open(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tape = self.saved.tape
        if tape is None or tape.recording:
            return inner(*args, **kwargs)
        offloader = self.offloader
        group = offloader.open(offloader.chunk(tape, self.stage), self.kind, self.layer)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        group.expect(list({id(leaf): leaf for leaf in given if leaf.requires_grad}.values()))
        inputs = set()
        if self.only is not None:
            inputs = {part.untyped_storage()._cdata for part in map(plain_part, given) if part is not None}
        offloader.scopes.append(Scope(group, self.only, inputs, self.stays))
        try:
            return inner(*args, **kwargs)
        finally:
            offloader.scopes.pop()


@torch.compiler.disable
def _as_written(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def offload_activations(
    model: nn.Module, targets: Sequence[str], offloader: Offloader, *, stage: int = 0, keep_last: bool = True
) -> list[Match]:
    """Send what the named parts of ``model`` save to the host, in place. Apply recompute before it.

    Args:
        model: the root; layers are the elements of its lists.
        targets: names of ``OFFLOAD``, or patterns of module names; where several take a tensor, the innermost does.
        offloader: may serve several stages.
        stage: place of ``model`` among the pipeline stages of this rank.
        keep_last: leave those of the last layer, whose backward comes at once.

    Returns:
        the parts.
    """
    saved, matches = saved_tensors(model), find(model, targets, OFFLOAD)
    saved.store = lambda tensor, tape: offloader.store(stage, tensor, tape)
    layer_of = {id(module): number for number, layer in enumerate(layers_of(model)) for module in layer.modules()}
    places = [layer_of.get(id(match.module), -1) for match in matches]
    last: dict[str, int] = {}
    for match, place in zip(matches, places, strict=True):
        last[match.target] = max(place, last.get(match.target, place))
    for match, place in zip(matches, places, strict=True):
        stays = keep_last and place == last[match.target]
        wrap(match.module, match.method, _Around(offloader, saved, stage, match.target, match.part.only, place, stays))
    return matches


def copies_for(device: torch.device) -> Copies:
    """Streams where the device has them; on a CPU a second arena of its memory; on meta, where nothing is, nothing."""
    kinds = {"cpu": SimulatedCopies, "meta": WeightlessCopies}
    return kinds[device.type]() if device.type in kinds else StreamCopies(device)


class Offload:
    """``activation_offload.targets``."""

    name = "offload"

    def __init__(self) -> None:
        # The stages of a rank share one, so that the order of their backward passes is known.
        self._of_runs: weakref.WeakKeyDictionary[PluginContext, tuple[Offloader, list[int]]] = (
            weakref.WeakKeyDictionary()
        )

    def validate(self, config: JobConfig) -> None:
        """Refuse what is not known or not there, and what keeps nothing."""
        targets, use = config.activation_offload.targets, config.plugins.use
        if not targets:
            raise ConfigError(f"{_KEY} = []: the plugin 'offload' needs at least one, such as 'core_attn'.")
        if "recompute" in use and use.index("recompute") > use.index("offload"):
            raise ConfigError("plugins.use: 'offload' comes after 'recompute', which decides what is left to travel.")
        check_targets(_KEY, targets, OFFLOAD)
        model = model_on_meta(config)
        matches = find(model, targets, OFFLOAD)
        check_all_matched(_KEY, targets, matches)
        _check_not_run_again(config, model, matches)

    def apply(self, model: nn.Module, context: PluginContext) -> nn.Module:
        """Change ``model``, all of it or a pipeline's stage, in place.

        Raises:
            MatchedNothing: there is none of what is to travel here.
        """
        config = context.config.activation_offload
        if context not in self._of_runs:
            copies = copies_for(context.device)
            offloader = Offloader(copies, fraction=config.fraction, min_bytes=config.min_bytes)
            self._of_runs[context] = offloader, [0]
        offloader, stages = self._of_runs[context]
        keep_last = getattr(model, "has_head", True)
        if not offload_activations(model, config.targets, offloader, stage=stages[0], keep_last=keep_last):
            raise MatchedNothing(f"{_KEY} = {config.targets} matched nothing in any stage. Name other parts.")
        stages[0] += 1
        return model


def _check_not_run_again(config: JobConfig, model: nn.Module, matches: Sequence[Match]) -> None:
    """Refuse a target that keeps nothing, since all of it is within what runs again.

    Raises:
        ConfigError: naming the first.
    """
    mode = config.activation_checkpoint.mode
    if mode == "targets":
        found = outermost(find(model, config.activation_checkpoint.targets, RECOMPUTE))
        again = {match.name for match in found if match.method == "forward"}
        cause = f"activation_checkpoint.targets = {config.activation_checkpoint.targets}"
    elif mode != "none" or "recompute" in config.plugins.use:
        layers = set(layers_of(model))
        again = {name for name, module in modules_by_name(model) if module in layers}
        cause = f"activation_checkpoint.mode = {mode!r}" if mode != "none" else "plugin 'recompute'"
    else:
        return
    kept = {match.target for match in matches if not match.within(again)}
    for match in matches:
        if match.target not in kept:
            raise ConfigError(
                f"{_KEY}: {match.target!r} keeps nothing that could travel: {cause} runs what is around it again. "
                "Take it out, or name the whole part that runs again, such as 'layers.*': its inputs are what is kept."
            )


PLUGIN = Offload()
