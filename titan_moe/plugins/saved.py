"""What a module's forward pass keeps for its backward pass, tensor by tensor.

All that autograd saves under a *root*, the module that a plugin was applied to, passes through one pair of
``saved_tensors_hooks``. A saved tensor stays as it is unless

- it lies in what a recomputed part made: then only the way to make it again is kept (``regions.py``), or
- it was saved where activations are offloaded: then it leaves the device (``offload.py``).

What is kept instead is an object with a method ``get``. It lives exactly as long as the node of the graph that saved
it, split backward passes included, so nothing here counts uses.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titan_moe.modules import wrap


class Packed(Protocol):
    """What stands for a saved tensor."""

    def get(self) -> Tensor:
        """The tensor, in the backward pass."""


def unpack(packed: "Tensor | Packed") -> Tensor:
    """What ``SavedTensors`` packed."""
    return packed if isinstance(packed, Tensor) else packed.get()


def plain_part(tensor: Tensor) -> Tensor | None:
    """The tensor, or a DTensor's part on this rank; None for what cannot be told from its storage alone."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    return tensor


@dataclass(frozen=True)
class Alias:
    """How a tensor lies in a storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    spread: tuple[Any, ...] | None
    """Of a DTensor: mesh, placements, global shape and strides."""

    @classmethod
    def of(cls, tensor: Tensor, part: Tensor) -> "Alias":
        """Of ``tensor``, whose ``plain_part`` is ``part``."""
        spread = None
        if isinstance(tensor, DTensor):
            spread = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return cls(part.dtype, part.shape, part.stride(), part.storage_offset(), spread)

    def on(self, base: Tensor) -> Tensor:
        """The same view of the storage of ``base``, of the same dtype."""
        part = base.as_strided(self.size, self.stride, self.offset)
        if self.spread is None:
            return part
        mesh, placements, shape, stride = self.spread
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


@dataclass
class Source:
    """A storage that can be made again, while it lives.

    Attributes:
        storage: weak; its end removes the entry from the tape.
        tensor: weak, the tensor that was made, to see whether it has been changed in place since.
        version: of ``tensor`` when it was made.
        cell: gives what stands for the storage once it is gone: an object with ``base()``.
    """

    storage: "weakref.ref[torch.UntypedStorage]"
    tensor: "weakref.ref[Tensor]"
    version: int
    dtype: torch.dtype
    cell: Callable[[], Any]

    def unchanged(self, part: Tensor) -> bool:
        """Whether ``part``, which lies in the storage, is what making it again would give."""
        made = self.tensor()
        current = self.version if made is None else made._version
        return current == self.version and part._version <= self.version and part.dtype == self.dtype


@dataclass(frozen=True)
class Remade:
    """A saved tensor that lies in a storage which is made again."""

    cell: Any
    alias: Alias

    def get(self) -> Tensor:
        return self.alias.on(self.cell.base())


class Tape:
    """One forward pass of a root."""

    def __init__(self, store: "Callable[[Tensor, Tape], Packed | None] | None") -> None:
        """
        Args:
            store: takes a saved tensor away, or returns None to leave it.
        """
        self.store = store
        self.recording = False
        """Whether a recomputed part is running: parts within it are parts of it."""
        self._sources: dict[int, Source] = {}

    def made(self, tensor: Tensor, cell: Callable[[], Any]) -> None:
        """Say that what ``tensor`` lies in can be made again; see :class:`Source`."""
        part = plain_part(tensor)
        if part is None or part.untyped_storage().nbytes() == 0:
            return
        storage = part.untyped_storage()
        key, sources = storage._cdata, self._sources

        def forget(_: Any) -> None:
            sources.pop(key, None)

        sources[key] = Source(weakref.ref(storage, forget), weakref.ref(tensor), tensor._version, part.dtype, cell)

    def remade(self, tensor: Tensor) -> Remade | None:
        """What stands for ``tensor`` if it can be made again."""
        part = plain_part(tensor) if self._sources else None
        source = None if part is None else self._sources.get(part.untyped_storage()._cdata)
        if source is None or not source.unchanged(part):
            return None
        return Remade(source.cell(), Alias.of(tensor, part))

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """What to keep of a tensor that autograd saves."""
        packed = self.remade(tensor)
        if packed is None and self.store is not None:
            packed = self.store(tensor, self)
        if packed is not None:
            return packed
        # Detached, since a node's own result would hold the node, which holds it.
        return tensor if tensor.is_leaf else tensor.detach()

    def close(self) -> None:
        """The forward pass is over."""
        self._sources.clear()


class SavedTensors:
    """The hooks of one root; see the head of this file."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.store: Callable[[Tensor, Tape], Packed | None] | None = None

    def around(self, root: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward pass of ``root`` with its tape."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.tape is not None:
            return forward(*args, **kwargs)
        self.tape = Tape(self.store)
        try:
            with saved_tensors_hooks(self.tape.pack, unpack):
                return forward(*args, **kwargs)
        finally:
            self.tape.close()
            self.tape = None


_OF_ROOTS: "weakref.WeakKeyDictionary[nn.Module, SavedTensors]" = weakref.WeakKeyDictionary()


def saved_tensors(root: nn.Module) -> SavedTensors:
    """The hooks of ``root``, put around its forward when first asked for."""
    if root not in _OF_ROOTS:
        _OF_ROOTS[root] = SavedTensors()
        wrap(root, "forward", _OF_ROOTS[root].around)
    return _OF_ROOTS[root]
