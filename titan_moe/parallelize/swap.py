"""Other people's MoE blocks, exchanged for ours in place: same weights, same names, same place in the model.

The exchange is by description. An adapter says where a block keeps its gate, its experts and its bias; parameters that
ours can use as they are stay the same objects under their own names. Experts in a list of modules are the exception:
they are stacked, into ``w1`` and ``w2`` where the list was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor, nn

from titan_moe.errors import ConfigError
from titan_moe.hf.config import config_from_hf
from titan_moe.hf.families import TRANSLATIONS
from titan_moe.moe import MoE, MoEConfig


@dataclass(frozen=True)
class Stacked:
    """How stacked expert weights become ours, ``w1 [E, n, F, D]``, ``w2 [E, D, F]``, ``b1 [E, n, F]``, ``b2 [E, D]``.

    Attributes:
        views: by our name, their name and a view of that tensor as ours.
        hidden_dims: by their name, the dim of the tensor that is the hidden dim F alone; None: the tensor has none;
            "fused": F is one dim with something else, which expert tensor parallelism cannot cut.
    """

    views: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]]
    hidden_dims: Mapping[str, int | str | None]


FUSED = Stacked(
    {"w1": ("gate_up_proj", lambda w: w.unflatten(1, (2, -1))), "w2": ("down_proj", lambda w: w)},
    {"gate_up_proj": "fused", "down_proj": 2},
)
"""``gate_up_proj [E, 2F, D]``, gate first, and ``down_proj [E, D, F]``."""

INTERLEAVED = Stacked(
    {
        "w1": ("gate_up_proj", lambda w: w.unflatten(2, (-1, 2)).permute(0, 3, 2, 1)),
        "w2": ("down_proj", lambda w: w.transpose(1, 2)),
        "b1": ("gate_up_proj_bias", lambda b: b.unflatten(1, (-1, 2)).transpose(1, 2)),
        "b2": ("down_proj_bias", lambda b: b),
    },
    {"gate_up_proj": "fused", "down_proj": 1, "gate_up_proj_bias": "fused", "down_proj_bias": None},
)
"""GPT-OSS: ``gate_up_proj [E, D, 2F]`` in pairs, ``down_proj [E, F, D]``, and biases."""


@dataclass(frozen=True)
class Listed:
    """Experts in a list of modules, each with linears; their weights are stacked.

    Attributes:
        gate: name of the gate linear within an expert; None: there is none.
        up, down: names of the other two.
    """

    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class MoEAdapter:
    """Where a MoE block keeps its parts; names are dotted, within the block.

    Attributes:
        block: the class of the block, or its name.
        config: what the block computes, from the block.
        router: the module with the gate's ``weight [E, D]`` and, where the block has it, ``bias [E]``.
        experts: the module of the experts.
        layout: how they are kept there.
        expert_bias: the selection bias ``[E]``, a buffer or a parameter anywhere in the block; None: it has none.
        shared: the module of the shared expert, used as it is; None: there is none.
        shared_gate: the module whose output's sigmoid scales the shared expert's; None: there is none.
        returns_pair: the block returns a tuple, of which the first is the output; ours gives None for the second.
    """

    block: type[nn.Module] | str
    config: Callable[[nn.Module], MoEConfig]
    router: str = "gate"
    experts: str = "experts"
    layout: Stacked | Listed = FUSED
    expert_bias: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    returns_pair: bool = False

    def matches(self, module: nn.Module) -> bool:
        """Whether ``module`` is such a block."""
        if isinstance(self.block, str):
            return type(module).__name__ == self.block
        return isinstance(module, self.block)


def swap_moe(module: nn.Module, adapter: MoEAdapter | Literal["auto"] = "auto") -> nn.Module:
    """Exchange every block in ``module`` that ``adapter`` describes for a titan_moe MoE layer, in place.

    Works on meta. Only the experts of a list are copied. The class of the new layer is a subclass of ``MoE``.

    Args:
        module: with MoE blocks somewhere in it, or one itself.
        adapter: what they are; ``auto``: those of a transformers model.

    Returns:
        ``module``, or the new layer where ``module`` is such a block itself.

    Raises:
        ConfigError: no such block, or one without a part that the adapter names, or of another shape; with ``auto``,
            a model of an unknown family, or with a setting that our layer cannot express.
    """
    if adapter == "auto":
        adapter = transformers_adapter(module)
        if adapter is None:
            raise ConfigError(
                f"a {type(module).__name__} is no transformers model whose MoE blocks are known: "
                f"{', '.join(_TRANSFORMERS)}. Describe them by a MoEAdapter."
            )
    if adapter.matches(module):
        return _swapped(module, adapter, type(module).__name__)
    places = [
        (parent, child, f"{path}.{child}".lstrip("."))
        for path, parent in module.named_modules()
        for child, block in parent.named_children()
        if adapter.matches(block)
    ]
    if not places:
        name = adapter.block if isinstance(adapter.block, str) else adapter.block.__name__
        raise ConfigError(f"the module has no MoE block {name} to exchange. Name the class of its MoE blocks.")
    for parent, child, name in places:
        setattr(parent, child, _swapped(getattr(parent, child), adapter, name))
    return module


_DEEPSEEK = {"expert_bias": "gate.e_score_correction_bias", "shared": "shared_experts"}
_TRANSFORMERS: dict[str, dict] = {
    "mixtral": {"block": "MixtralSparseMoeBlock"},
    "qwen2_moe": {
        "block": "Qwen2MoeSparseMoeBlock",
        "shared": "shared_expert",
        "shared_gate": "shared_expert_gate",
    },
    "qwen3_moe": {"block": "Qwen3MoeSparseMoeBlock"},
    "deepseek_v2": {"block": "DeepseekV2Moe", "shared": "shared_experts"},
    "deepseek_v3": {"block": "DeepseekV3MoE", **_DEEPSEEK},
    "glm4_moe": {"block": "Glm4MoeMoE", **_DEEPSEEK},
    "minimax_m2": {"block": "MiniMaxM2SparseMoeBlock", "expert_bias": "e_score_correction_bias"},
    "gpt_oss": {"block": "GptOssMLP", "router": "router", "layout": INTERLEAVED, "returns_pair": True},
}


def transformers_adapter(module: nn.Module) -> MoEAdapter | None:
    """The adapter for the MoE blocks of a transformers model; None for any other module.

    Raises:
        ConfigError: a setting of the model that our layer cannot express.
    """
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _TRANSFORMERS or not hasattr(config, "to_dict"):
        return None
    assert _TRANSFORMERS.keys() <= TRANSLATIONS.keys()
    moe = config_from_hf(config.to_dict()).moe
    return MoEAdapter(config=lambda block: moe, **_TRANSFORMERS[kind])


def _swapped(block: nn.Module, adapter: MoEAdapter, name: str) -> MoE:
    for part in (adapter.router, adapter.experts, adapter.expert_bias, adapter.shared, adapter.shared_gate):
        if part is not None and not _has(block, part):
            raise ConfigError(f"{name}, a {type(block).__name__}, has no {part!r}. Name it in the MoEAdapter.")
    config = adapter.config(block)
    with torch.device("meta"):
        layer = MoE(config)
    router, experts = block.get_submodule(adapter.router), block.get_submodule(adapter.experts)
    _take(layer.router, {"weight": router.weight, "bias": getattr(router, "bias", None)}, name)
    for child, submodule in router.named_children():
        layer.router.add_module(child, submodule)
    if isinstance(adapter.layout, Stacked):
        _take_stacked(layer.experts, experts, adapter.layout, name)
    else:
        _take(layer.experts, _stack(experts, adapter.layout), name)
    layer.balance.to_empty(device=router.weight.device)
    layer.balance.reset()
    aliases = {"router": adapter.router, "experts": adapter.experts}
    if adapter.shared is not None:
        aliases["shared"] = adapter.shared
        layer.shared = block.get_submodule(adapter.shared)
    _rename(layer, aliases)
    if adapter.shared_gate is not None:
        _scale_shared(layer, block, adapter.shared, adapter.shared_gate)
    if adapter.expert_bias is not None:
        _take_bias(layer, block, adapter.expert_bias, name)
    # Optimizers count parameters in this order.
    for child in [name for name, _ in block.named_children() if name in layer._modules]:
        layer._modules[child] = layer._modules.pop(child)
    layer._modules["balance"] = layer._modules.pop("balance")
    if adapter.returns_pair:
        layer.__class__ = type(type(layer).__name__, (_Pair, type(layer)), {})
    return layer.train(block.training)


class _Pair:
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs), None


def _has(block: nn.Module, path: str) -> bool:
    try:
        return attrgetter(path)(block) is not None
    except AttributeError:
        return False


def _take(module: nn.Module, tensors: Mapping[str, Tensor | None], name: str) -> None:
    """Give ``module`` these parameters for its own; all must be there, of the right shape."""
    for ours, own in list(module._parameters.items()):
        given = tensors.get(ours)
        if (own is None) != (given is None) or (own is not None and own.shape != given.shape):
            has = "none" if given is None else list(given.shape)
            wants = "none" if own is None else list(own.shape)
            raise ConfigError(f"{name}: {ours} of the {type(module).__name__} is {has}, its MoEConfig says {wants}.")
        if given is not None:
            module._parameters[ours] = given if isinstance(given, nn.Parameter) else nn.Parameter(given)


def _take_stacked(ours: nn.Module, theirs: nn.Module, layout: Stacked, name: str) -> None:
    viewed = {}
    for key, (their_name, view) in layout.views.items():
        if not hasattr(theirs, their_name):
            raise ConfigError(f"{name}: its experts, a {type(theirs).__name__}, have no {their_name!r}.")
        viewed[key] = view(getattr(theirs, their_name).detach())
    _take(ours, viewed, name)
    ours._parameters.clear()
    used = {their_name for their_name, _ in layout.views.values()}
    for their_name, parameter in theirs.named_parameters(recurse=False):
        if their_name not in used:
            raise ConfigError(f"{name}: nothing of ours is like {their_name!r} of the {type(theirs).__name__}.")
        ours.register_parameter(their_name, parameter)
    absent = {key for key in ("w1", "w2", "b1", "b2") if key not in layout.views}
    reads = {key: property(_viewer(*how)) for key, how in layout.views.items()}
    reads |= dict.fromkeys(absent) | {"hidden_dims": dict(layout.hidden_dims)}
    ours.__class__ = type(type(ours).__name__, (type(ours),), reads)


def _viewer(name: str, view: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Tensor]:
    return lambda self: view(getattr(self, name))


@torch.no_grad()
def _stack(experts: nn.Module, layout: Listed) -> dict[str, Tensor | None]:
    each = list(experts.children())
    first = [layout.up] if layout.gate is None else [layout.gate, layout.up]

    def linears(expert: nn.Module, names: list[str], part: str) -> list[Tensor | None]:
        return [getattr(expert.get_submodule(n), part) for n in names]

    w1 = torch.stack([torch.stack(linears(expert, first, "weight")) for expert in each])
    w2 = torch.stack([linears(expert, [layout.down], "weight")[0] for expert in each])
    tensors = {"w1": w1, "w2": w2}
    if linears(each[0], [layout.down], "bias")[0] is not None:
        tensors["b1"] = torch.stack([torch.stack(linears(expert, first, "bias")) for expert in each])
        tensors["b2"] = torch.stack([linears(expert, [layout.down], "bias")[0] for expert in each])
    return tensors


def _rename(layer: MoE, aliases: Mapping[str, str]) -> None:
    """Keep children under their own names; ours find them there."""
    reads = {}
    for ours, theirs in aliases.items():
        if ours == theirs:
            continue
        child = layer._modules.pop(ours)
        parent, _, last = theirs.rpartition(".")
        if parent:
            raise ConfigError(f"{theirs!r}: parts of a MoE block must be its own children.")
        layer.add_module(last, child)
        reads[ours] = property(attrgetter(theirs))
    layer.__class__ = type(type(layer).__name__, (type(layer),), reads)


def _scale_shared(layer: MoE, block: nn.Module, shared: str, gate: str) -> None:
    layer.add_module(gate, block.get_submodule(gate))

    def scaled(self: MoE) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.sigmoid(self.get_submodule(gate)(x)) * self.get_submodule(shared)(x)

    layer.__class__ = type(type(layer).__name__, (type(layer),), {"shared": property(scaled)})


def _take_bias(layer: MoE, block: nn.Module, path: str, name: str) -> None:
    """The selection bias stays where it is and what it is, buffer or parameter; the router finds it there."""
    bias, router = attrgetter(path)(block), layer.router
    own = router._buffers.pop("expert_bias", None)
    if own is None or bias.shape != own.shape:
        wants = "none" if own is None else list(own.shape)
        raise ConfigError(f"{name}: {path} is {list(bias.shape)}, the MoEConfig says {wants}.")
    home, _, leaf = path.rpartition(".")
    first = home.partition(".")[0]
    if first and first not in layer._modules:
        layer.add_module(first, block.get_submodule(first))
    owner, old = layer.get_submodule(home), block.get_submodule(home)
    if isinstance(bias, nn.Parameter):
        # Counts move it, not gradients.
        owner.register_parameter(leaf, bias.requires_grad_(False))
    else:
        owner.register_buffer(leaf, bias, persistent=leaf not in old._non_persistent_buffers_set)
    # Past the registry of children, since it is none. A deep copy follows it.
    object.__setattr__(router, "home_of_bias", layer)
    read = property(lambda self: attrgetter(path)(self.home_of_bias))
    router.__class__ = type(type(router).__name__, (type(router),), {"expert_bias": read})
