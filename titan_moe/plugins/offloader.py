"""Which saved tensors are on the host, in which order they leave and return: the books of activation offload."""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.plugins.saved import Alias, Remade, Tape, plain_part
from titan_moe.plugins.streams import Copies


class Offloader:
    """The activations of one rank that are on the host, over all pipeline stages that it holds.

    Attributes:
        left, returned, cancelled: bytes sent to the host; come back; and not gone after all, for being wanted first.
        waiting: forward passes whose backward pass is still to come, oldest first.
    """

    def __init__(self, copies: Copies, *, fraction: float = 1.0, min_bytes: int = 0) -> None:
        """
        Args:
            copies: how bytes travel.
            fraction: of the bytes of each kind in a forward pass, the share that travels.
            min_bytes: smaller storages stay.
        """
        self.copies, self.fraction, self.min_bytes = copies, fraction, min_bytes
        self.left = self.returned = self.cancelled = 0
        self.waiting: list[Chunk] = []
        self.scopes: list[Scope] = []
        self._leaving: dict[str, Group] = {}
        self._pool: dict[tuple[int, torch.dtype], list[tuple[Tensor, Any]]] = defaultdict(list)
        self._chunks: weakref.WeakKeyDictionary[Tape, Chunk] = weakref.WeakKeyDictionary()

    def chunk(self, tape: Tape, stage: int) -> "Chunk":
        """The notes on one forward pass of a stage."""
        if tape not in self._chunks:
            self.waiting = [chunk for chunk in self.waiting if any(True for _ in chunk.groups())]
            self._chunks[tape] = Chunk(stage)
            self.waiting.append(self._chunks[tape])
        return self._chunks[tape]

    def open(self, chunk: "Chunk", kind: str, layer: int) -> "Group":
        """The tensors of a kind in a layer; those of the layer before are gone from here on."""
        before = self._leaving.get(kind)
        if before is not None and before.chunk is chunk and before.layer == layer:
            return before
        if before is not None:
            before.settle()
        group = self._leaving[kind] = Group(self, chunk, kind, layer)
        chunk.by_kind[kind].append(weakref.ref(group))
        return group

    def store(self, stage: int, tensor: Tensor, tape: Tape) -> Remade | None:
        """What stands for a saved tensor; None for one that always stays."""
        part = plain_part(tensor)
        if part is None or part.untyped_storage().nbytes() < max(self.min_bytes, 1) or _is_parameter(tensor):
            return None
        chunk, storage = self.chunk(tape, stage), part.untyped_storage()
        entry = chunk.entry(storage)
        if entry is None:
            entry = Entry(_flat(part))
            chunk.entries[storage._cdata] = weakref.ref(storage), weakref.ref(entry)
        if entry.dtype != part.dtype:
            return None
        scope = next((scope for scope in reversed(self.scopes) if scope.wants(storage)), None)
        if scope is not None and entry.group is None:
            scope.group.take(entry, stays=scope.stays)
        elif scope is not None and entry.group.layer != scope.group.layer:
            # Tables and masks that all layers share would return with the first that asks.
            entry.group.keep(entry, part)
        return Remade(entry, Alias.of(tensor, part))

    def borrow(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """A buffer on the host, and the event after which it may be written."""
        free = self._pool[numel, dtype]
        return free.pop() if free else (self.copies.host_buffer(numel, dtype), None)

    def give(self, buffer: Tensor, event: Any) -> None:
        """Take a buffer back, free after ``event``."""
        self._pool[buffer.numel(), buffer.dtype].append((buffer, event))

    def following(self, group: "Group") -> "Group | None":
        """Whose backward comes after that of ``group``: an earlier layer, then the next pass.

        Of the passes that wait, those of later stages come first, and of one stage the older ones.
        """
        for earlier in reversed(list(group.chunk.groups(group.kind))):
            if earlier.layer < group.layer and earlier.is_away():
                return earlier
        others = [chunk for chunk in self.waiting if chunk is not group.chunk]
        for chunk in sorted(others, key=lambda chunk: -chunk.stage):
            for last in reversed(list(chunk.groups(group.kind))):
                if last.is_away():
                    return last
        return None


@dataclass(eq=False)
class Entry:
    """One storage that a forward pass saved, flat: on the device, on the host, or on its way."""

    device: Tensor | None
    host: Tensor | None = None
    event: Any = None
    group: "Group | None" = None
    shared: bool = False
    """Saved by several layers."""

    def __post_init__(self) -> None:
        self.dtype, self.numel, self.nbytes = self.device.dtype, self.device.numel(), self.device.nbytes

    def base(self) -> Tensor:
        """It, on the device."""
        if self.group is not None:
            self.group.use(self)
        return self.device

    def __del__(self) -> None:
        # The graph went without its backward pass.
        if self.host is not None:
            self.group.offloader.give(self.host, self.event)
        elif self.event is not None:
            self.group.offloader.copies.wait(self.event)


class Group:
    """What one layer saved of one kind in one forward pass."""

    def __init__(self, offloader: Offloader, chunk: "Chunk", kind: str, layer: int) -> None:
        self.offloader, self.chunk, self.kind, self.layer = offloader, chunk, kind, layer
        self.members: list[weakref.ref[Entry]] = []
        self.leaving: list[Entry] = []
        self.calls = 0

    def take(self, entry: Entry, *, stays: bool) -> None:
        """Note ``entry`` as one of this group, and send it unless it is to stay."""
        entry.group, offloader, chunk = self, self.offloader, self.chunk
        if entry.shared:
            return
        self.members.append(weakref.ref(entry))
        chunk.seen[self.kind] += entry.nbytes
        if stays or chunk.sent[self.kind] + entry.nbytes > offloader.fraction * chunk.seen[self.kind]:
            return
        chunk.sent[self.kind] += entry.nbytes
        offloader.left += entry.nbytes
        entry.host, free = offloader.borrow(entry.numel, entry.dtype)
        entry.event = offloader.copies.out(entry.device, entry.host, free)
        self.leaving.append(entry)

    def settle(self) -> None:
        """What has been sent is gone from the device."""
        for entry in self.leaving:
            self.offloader.copies.wait(entry.event)
            entry.device = entry.event = None
        self.leaving.clear()

    def is_away(self) -> bool:
        """Whether some of it is on the host only."""
        return any(entry.device is None for entry in self._living())

    def load(self) -> None:
        """Begin to bring back what is away."""
        offloader = self.offloader
        for entry in self._living():
            if entry.device is None:
                entry.device = offloader.copies.device_buffer(entry.numel, entry.dtype)
                entry.event = offloader.copies.back(entry.host, entry.device)
                offloader.give(entry.host, entry.event)
                entry.host = None
                offloader.returned += entry.nbytes

    def use(self, entry: Entry) -> None:
        """See to it that ``entry`` is on the device."""
        if entry in self.leaving:
            self._cancel(entry)
        self.load()
        if entry.event is not None:
            self.offloader.copies.wait(entry.event)
            entry.event = None

    def keep(self, entry: Entry, part: Tensor) -> None:
        """``entry`` does not travel after all; ``part`` lies in it."""
        entry.shared = True
        if entry in self.leaving:
            self._cancel(entry)
        elif entry.device is None:
            entry.device = _flat(part)
            self.offloader.give(entry.host, None)
            self.offloader.cancelled += entry.nbytes
            entry.host = None

    def _cancel(self, entry: Entry) -> None:
        self.leaving.remove(entry)
        self.offloader.give(entry.host, entry.event)
        self.offloader.cancelled += entry.nbytes
        entry.host = entry.event = None

    def expect(self, inputs: list[Tensor]) -> None:
        """When ``inputs`` of a call in this layer have their gradients, it has used up what it saved."""
        missing = len(inputs)

        # Not torch's hook for several gradients: it knows their nodes, which know it, and so outlives the graph.
        def arrived(_: Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                self._call_done()

        self.calls += missing > 0
        for tensor in inputs:
            tensor.register_hook(arrived)

    def _call_done(self) -> None:
        self.calls -= 1
        following = self.offloader.following(self) if self.calls == 0 else None
        if following is not None:
            following.load()

    def _living(self) -> Iterator[Entry]:
        return (entry for ref in self.members if (entry := ref()) is not None)


@dataclass(eq=False)
class Chunk:
    """One forward pass of one stage. It holds nothing: what the graph drops is gone."""

    stage: int
    entries: dict[int, tuple[weakref.ref, "weakref.ref[Entry]"]] = field(default_factory=dict)
    by_kind: dict[str, list["weakref.ref[Group]"]] = field(default_factory=lambda: defaultdict(list))
    seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def entry(self, storage: torch.UntypedStorage) -> Entry | None:
        """That of ``storage``, if it was saved before."""
        known = self.entries.get(storage._cdata)
        return known[1]() if known is not None and known[0]() is storage else None

    def groups(self, kind: str | None = None) -> Iterator[Group]:
        """Those that live, of a kind or of all, in the order of the forward pass."""
        kinds = list(self.by_kind) if kind is None else [kind]
        return (group for name in kinds for ref in self.by_kind[name] if (group := ref()) is not None)


@dataclass
class Scope:
    """A call of a module whose saved tensors travel."""

    group: Group
    only: str | None
    inputs: set[int]
    stays: bool

    def wants(self, storage: torch.UntypedStorage) -> bool:
        return self.only is None or (storage._cdata in self.inputs) == (self.only == "inputs")


_VIEWS = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("AsStridedBackward0", "SelectBackward0", "SliceBackward0", "UnsqueezeBackward0", "AliasBackward0"),
    *("ToTorchTensorBackward", "_ToTorchTensorBackward", "ReshapeAliasBackward0", "SplitBackward0"),
}


def _is_parameter(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter or a view of one, which FSDP and the model hold anyway."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().endswith("AccumulateGrad")


def _flat(part: Tensor) -> Tensor:
    """All of the storage that ``part`` lies in."""
    return part.detach().as_strided((part.untyped_storage().nbytes() // part.element_size(),), (1,), 0)
