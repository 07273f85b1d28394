"""What a plan says of one module: how its parameters lie and what crosses its edges.

Two kinds of activations exist under tensor parallelism, and which one a tensor is decides where its gradient lives:

- the *stream*, a DTensor on the tp axis: sharded over its tokens (dim -2), or replicated without sequence parallel;
- plain tensors inside a region (attention, feed-forward, experts): whatever this rank computes on. A plain tensor's
  gradient is a partial sum over tp, also where its values are the same on all tp ranks.

So a replicated parameter that meets plain tensors, or this rank's tokens of the stream, has a ``Partial`` gradient.
With one tp rank everything is plain and the styles of dense modules change nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor.placement_types import Placement

from titan_moe.errors import ConfigError
from titan_moe.modules import wrap
from titan_moe.moe import MoE
from titan_moe.moe.dispatch import build_dispatcher, check_package
from titan_moe.parallelize.context import ContextParallel, SharedAttention
from titan_moe.parallelize.crossing import local_parameters, to_dtensor, to_local
from titan_moe.parallelize.mesh import Meshes
from titan_moe.parallelize.vocab import embed, head


@dataclass
class ApplyContext:
    """What styles know of the whole.

    Attributes:
        root: the module that ``parallelize`` was called on.
        meshes: of the world.
        sequence_parallel: keep the stream sharded over its tokens.
        cp_method: how attention shares sequences over cp.
    """

    root: nn.Module
    meshes: Meshes
    sequence_parallel: bool = True
    cp_method: str = "allgather"
    # Parameters by id, so that those which two modules share stay shared.
    shared: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    @property
    def tp(self) -> DeviceMesh:
        """The tp axis."""
        return self.meshes.dense["tp"]

    @property
    def tp_size(self) -> int:
        """Ranks that share dense matrices."""
        return self.meshes.degrees.tp

    def stream(self, ndim: int) -> Placement:
        """How a stream tensor of ``ndim`` dims lies on tp."""
        return Shard(ndim - 2) if self.sequence_parallel else Whole()

    def distribute(self, module: nn.Module, mesh: DeviceMesh, **placements: Sequence[Placement]) -> None:
        """Turn own parameters of ``module``, named by keyword, into DTensors on ``mesh``; absent ones are skipped."""
        for name, placed in placements.items():
            parameter = module._parameters.get(name)
            if parameter is None:
                continue
            if id(parameter) not in self.shared:
                local = distribute_tensor(parameter.detach(), mesh, placed, src_data_rank=None)
                self.shared[id(parameter)] = (parameter, nn.Parameter(_own(local), parameter.requires_grad))
            distributed = self.shared[id(parameter)][1]
            if distributed.placements != tuple(placed):
                raise ConfigError(
                    f"{type(module).__name__}.{name} is shared by two modules whose styles place it differently: "
                    f"{distributed.placements} and {tuple(placed)}. Give both modules styles that agree."
                )
            module._parameters[name] = distributed


class Style(Protocol):
    """One entry of a plan. One that can refuse a module does so in a method ``check`` with the arguments of ``apply``.

    All are asked before the first is applied, so that a refusal leaves every module as it was.
    """

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        """Change ``module``, called ``name`` in ``context.root``, in place."""


def _own(tensor: DTensor) -> DTensor:
    """``tensor`` with memory of its own, so that the full tensor it is a slice of can be freed."""
    local = to_local(tensor, tensor.placements)
    if local.is_meta or local.untyped_storage().nbytes() == local.numel() * local.element_size():
        return tensor
    return to_dtensor(local.clone(), tensor.device_mesh, tensor.placements, tensor.shape)


def gather(x: Tensor) -> Tensor:
    """All tokens of the stream as a plain tensor; its gradient is a partial sum. A plain tensor passes.

    The result is remembered on ``x``: linears with one input, as queries, keys and values are, share one collective
    in each direction.
    """
    if not isinstance(x, DTensor):
        return x
    state = (torch.is_grad_enabled(), None if x.is_inference() else x._version)
    known = x.__dict__.get("_gathered")
    if known is None or known[0] != state:
        whole = to_local(x.redistribute(placements=[Whole()]), [Partial()])
        known = x._gathered = (state, whole)
    return known[1]


def scatter(partial: Tensor, context: ApplyContext) -> DTensor:
    """The stream, from each tp rank's partial sum over all tokens."""
    summed = to_dtensor(partial, context.tp, [Partial()], partial.shape)
    return summed.redistribute(placements=[context.stream(partial.ndim)])


def as_placed(parameter: DTensor) -> Sequence[Placement]:
    """The gradient of a sharded parameter lies as the parameter does."""
    return parameter.placements


def _check_linear(name: str, module: nn.Module, style: str) -> None:
    if not isinstance(module, nn.Linear):
        raise ConfigError(f"{style} on {name}, a {type(module).__name__}: it is for nn.Linear and its subclasses.")


@dataclass(frozen=True)
class Colwise:
    """A linear whose output features are shared out: stream or plain input, plain output of this rank's features."""

    def check(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        _check_linear(name, module, "Colwise")

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if context.tp_size == 1:
            return
        context.distribute(module, context.tp, weight=[Shard(0)], bias=[Shard(0)])

        def around(self: nn.Module, inner: Callable, x: Tensor) -> Tensor:
            with local_parameters(self, as_placed):
                return inner(gather(x))

        wrap(module, "forward", around)


@dataclass(frozen=True)
class Rowwise:
    """A linear whose input features are shared out: plain input of this rank's features, stream output.

    The bias is added once, to the sum.
    """

    def check(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        _check_linear(name, module, "Rowwise")

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if context.tp_size == 1:
            return
        context.distribute(module, context.tp, weight=[Shard(1)], bias=[Whole()])

        def around(self: nn.Module, inner: Callable, x: Tensor) -> DTensor:
            if isinstance(x, DTensor):
                raise ConfigError(f"Rowwise on {name}: its input is the stream. It follows Colwise modules.")
            bias = self._parameters["bias"]
            with local_parameters(self, as_placed):
                self._parameters["bias"] = None
                partial = inner(x)
                self._parameters["bias"] = bias
            out = scatter(partial, context)
            return out if bias is None else out + bias

        wrap(module, "forward", around)


@dataclass(frozen=True)
class VocabParallel:
    """An embedding or a head whose vocabulary is shared out.

    Embedding: the same token ids on all tp ranks in, the stream out. Head: stream in, logits out as a DTensor that is
    sharded over the vocabulary; no rank holds them all. ``titan_moe.models.token_losses`` takes them as they are.
    """

    def check(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if not isinstance(module, nn.Embedding | nn.Linear):
            raise ConfigError(
                f"VocabParallel on {name}, a {type(module).__name__}: it is for nn.Embedding and nn.Linear."
            )

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if context.tp_size == 1:
            return
        context.distribute(module, context.tp, weight=[Shard(0)], bias=[Shard(0)])

        def logits(self: nn.Module, inner: Callable, x: Tensor) -> DTensor:
            size = self.weight.shape[0]
            with local_parameters(self, as_placed):
                return head(inner, gather(x), context.tp, size)

        def around(self: nn.Module, inner: Callable, ids: Tensor) -> DTensor:
            size = self.weight.shape[0]
            with local_parameters(self, as_placed):
                return scatter(embed(self, ids, context.tp, size), context)

        if isinstance(module, nn.Linear):
            wrap(module, "forward", logits)
            return
        wrap(module, "forward", around)
        if hasattr(module, "as_head"):
            wrap(module, "as_head", logits)


def _replicated(self: nn.Module, inner: Callable, x: Tensor, output: str) -> Tensor:
    if not isinstance(x, DTensor):
        with local_parameters(self, lambda _: [Partial()]):
            return inner(x)
    gathered, whole = output == "gathered", x.placements[0].is_replicate()
    with local_parameters(self, lambda _: [Whole() if whole and not gathered else Partial()]):
        y = inner(to_local(x, [Partial()] if whole and gathered else x.placements))
    if whole and gathered:
        return y
    out = to_dtensor(y, x.device_mesh, x.placements, (*x.shape[:-1], y.shape[-1]))
    return gather(out) if gathered else out


@dataclass(frozen=True)
class Replicate:
    """A module that every tp rank holds whole and that works on each token by itself.

    Of the stream it computes this rank's tokens and returns the stream, or with ``output="gathered"`` all tokens as
    a plain tensor, for a region that follows. A plain input gives a plain output.
    """

    output: Literal["same", "gathered"] = "same"

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if context.tp_size == 1:
            return
        context.distribute(module, context.tp, **{name: [Whole()] for name in module._parameters})
        wrap(module, "forward", lambda m, inner, x: _replicated(m, inner, x, self.output))


@dataclass(frozen=True)
class SequenceParallel:
    """A norm on the stream."""

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        Replicate().apply(name, module, context)


@dataclass(frozen=True)
class ShardedNorm:
    """An RMSNorm, torch's or transformers', over features that tp shares out: plain input and output of this rank's."""

    def check(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if not isinstance(module, nn.RMSNorm) and not hasattr(module, "variance_epsilon"):
            raise ConfigError(f"ShardedNorm on {name}, a {type(module).__name__}: it is for nn.RMSNorm.")

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if context.tp_size == 1:
            return
        features, eps = module.weight.numel(), getattr(module, "variance_epsilon", None) or module.eps
        context.distribute(module, context.tp, weight=[Shard(0)])

        def around(self: nn.Module, inner: Callable, x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            # Every rank's output depends on the sum, so its gradient is summed over the ranks too.
            squares = wide.square().sum(-1, keepdim=True)
            squares = to_dtensor(squares, context.tp, [Partial()], squares.shape)
            squares = to_local(squares.redistribute(placements=[Whole()]), [Partial()])
            with local_parameters(self, as_placed):
                return (wide * (squares / features + eps).rsqrt() * self.weight).to(x.dtype)

        wrap(module, "forward", around)


@dataclass(frozen=True)
class Router:
    """A router: each tp rank routes its own tokens."""

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        if context.tp_size == 1:
            return
        context.distribute(module, context.tp, **{name: [Whole()] for name in module._parameters})

        def around(self: nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
            with local_parameters(self, lambda _: [Partial()]):
                return inner(*args, **kwargs)

        wrap(module, "forward", around)


@dataclass(frozen=True)
class Attention:
    """An attention block: its own parameters, one per head as sinks are, follow their heads.

    Each tp rank computes its own heads. A block that takes their number from the shape of its projections, as with
    ``view(B, S, -1, head_dim)``, needs nothing; of any other, name the attributes that say how many there are.

    Under context parallelism each rank gives it its own tokens. A block with an attribute ``context_parallel`` is
    given what stands in for its attention; of any other ``scaled_dot_product_attention`` is caught in its forward.

    Args:
        cp: how sequences are shared over the cp axis, ``allgather`` or ``alltoall``; None: as configured.
        heads: attributes of the block that count query or key-value heads; each becomes this rank's number.
    """

    cp: Literal["allgather", "alltoall"] | None = None
    heads: tuple[str, ...] = ()

    def check(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        for attribute in self.heads:
            count = getattr(module, attribute, None)
            if not isinstance(count, int) or count % context.tp_size:
                raise ConfigError(
                    f"Attention(heads=({attribute!r},)) on {name}: {attribute} is {count!r}, not a number of heads "
                    f"that tensor_parallel_degree = {context.tp_size} divides."
                )

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        for attribute in self.heads:
            setattr(module, attribute, getattr(module, attribute) // context.tp_size)
        if context.tp_size > 1 and any(p is not None for p in module._parameters.values()):
            context.distribute(module, context.tp, **{name: [Shard(0)] for name in module._parameters})

            def around(self: nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
                with local_parameters(self, as_placed):
                    return inner(*args, **kwargs)

            wrap(module, "forward", around)
        if context.meshes.degrees.cp > 1:
            parallel = ContextParallel(context.meshes.dense["cp"].get_group(), self.cp or context.cp_method)
            if hasattr(module, "context_parallel"):
                module.context_parallel = parallel
                return

            def shared(self: nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
                with SharedAttention(parallel, name):
                    return inner(*args, **kwargs)

            wrap(module, "forward", shared)


@dataclass(frozen=True)
class Experts:
    """The experts of a titan_moe MoE layer: shared over ep, the hidden dim of each over etp.

    The layer around them works on this rank's tokens: what routes, projects and dispatches there sees each token on
    one tp rank, with or without sequence parallel.
    """

    def check(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        layer = self._layer(name, context)
        if not isinstance(layer, MoE):
            raise ConfigError(
                f"Experts on {name}: they belong to a {type(layer).__name__}, not to a titan_moe.moe.MoE. Exchange it "
                "by swap_moe first."
            )
        degrees = context.meshes.degrees
        if degrees.etp > 1 and "fused" in module.hidden_dims.values():
            raise ConfigError(
                f"parallelism.expert_tensor_parallel_degree = {degrees.etp}: {name} keeps its gate and up weights in "
                "one dim, which cannot be cut. Set it to 1 and raise expert_parallel_degree, or use titan_moe's own "
                "layout."
            )
        if degrees.ep * degrees.etp > 1:
            check_package(layer.config.dispatcher)

    def apply(self, name: str, module: nn.Module, context: ApplyContext) -> None:
        layer, degrees = self._layer(name, context), context.meshes.degrees
        if degrees.ep * degrees.etp > 1:
            self._share(module, layer, context)
        if degrees.tp > 1:
            wrap(layer, "routed", _on_own_tokens)

    @staticmethod
    def _layer(name: str, context: ApplyContext) -> nn.Module:
        return context.root.get_submodule(name.rpartition(".")[0])

    def _share(self, module: nn.Module, layer: MoE, context: ApplyContext) -> None:
        mesh, etp = context.meshes.expert["ep", "etp"], context.meshes.degrees.etp
        for key, dim in module.hidden_dims.items():
            context.distribute(module, mesh, **{key: [Shard(0), Shard(dim) if isinstance(dim, int) else Whole()]})
        config = layer.config
        layer.dispatcher = build_dispatcher(
            "alltoall" if config.dispatcher == "local" else config.dispatcher,
            num_experts=config.num_experts,
            ep_group=context.meshes.dispatch.get_group(),
            etp_size=etp,
            recv_capacity_factor=config.recv_capacity_factor,
        )
        # Each etp rank computes part of the sum over the hidden dim; the bias on that sum belongs to one of them.
        adds_bias = mesh.get_local_rank("etp") == 0

        def around(self: nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
            b2 = self._parameters.get("b2")
            with local_parameters(self, as_placed):
                if b2 is not None and etp > 1:
                    self._parameters["b2"] = to_local(b2, [Shard(0), Partial()]) * float(adds_bias)
                return inner(*args, **kwargs)

        wrap(module, "forward", around)


def _on_own_tokens(self: nn.Module, inner: Callable, x: Tensor, valid: Tensor | None = None) -> Tensor:
    """``inner`` on this rank's tokens of the stream, of which there may be none."""
    if not isinstance(x, DTensor):
        return inner(x, valid)
    tokens = x.redistribute(placements=[Shard(x.ndim - 2)])
    if valid is not None:
        mesh, dim = x.device_mesh, valid.ndim - 1
        whole = to_dtensor(valid, mesh, [Whole()], valid.shape)
        valid = to_local(whole.redistribute(placements=[Shard(dim)]), None)
    y = inner(to_local(tokens, tokens.placements), valid)
    return to_dtensor(y, x.device_mesh, tokens.placements, x.shape).redistribute(placements=x.placements)
