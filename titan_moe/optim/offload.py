"""Optimizer state in host memory between steps (report section 4.1.6).

A step goes over its parameters in buckets. The state of the next bucket comes to the device while this one is
updated, and that of the one before leaves, on streams of their own. On a CPU the same code runs with memory of its own
as the host's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from titan_moe.optim.parts import around, local
from titan_moe.optim.slot import Slot, States


class HostMemory:
    """Tensors on the host, and copies to and from the device that no kernel waits for.

    Args:
        device: where the parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []
        self._owned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._left: torch.cuda.Event | None = None

    def new(self, like: Tensor) -> Tensor:
        """Uninitialised host memory in the layout of ``like``."""
        tensor = torch.empty_like(like, device="cpu", pin_memory=self._cuda)
        self._owned[tensor.data_ptr()] = tensor
        return tensor

    def copy_of(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the host, when all work on it is done."""
        copy = self.new(tensor)
        copy.copy_(tensor)
        return copy

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one that ``new`` gave."""
        return tensor.data_ptr() in self._owned

    def bring(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], "torch.cuda.Event | None"]:
        """Copies on the device, and what to ``wait`` for before they are read."""
        if not self._cuda:
            return [tensor.clone() for tensor in tensors], None
        incoming, outgoing = self._streams
        # What is brought back must have left.
        incoming.wait_stream(outgoing)
        with torch.cuda.stream(incoming):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        return copies, incoming.record_event()

    def wait(self, tensors: Sequence[Tensor], event: "torch.cuda.Event | None") -> None:
        """Order what follows on the device after ``bring``."""
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(stream)

    def take(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each ``(device tensor, host tensor)`` to the host after what the device was given so far."""
        if not self._cuda:
            for source, target in pairs:
                target.copy_(source)
            return
        outgoing = self._streams[1]
        outgoing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(outgoing):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(outgoing)
            self._left = outgoing.record_event()

    def settle(self) -> None:
        """Wait until all that was taken has arrived; the host may then read it."""
        if self._left is not None:
            self._left.synchronize()
            self._left = None


@dataclass
class Offload:
    """Which states live on the host.

    Args:
        host: their memory.
        away: slots whose states leave the device.
        on_cpu: those of ``away`` whose updates run on the host, so that their states stay there.
        bucket_bytes: state that is moved at once.
    """

    host: HostMemory
    away: frozenset[str]
    on_cpu: frozenset[str]
    bucket_bytes: int

    def buckets(self, slots: Sequence[Slot]) -> list[list[Slot]]:
        """``slots`` in parts with about ``bucket_bytes`` of state that moves."""
        parts: list[list[Slot]] = [[]]
        size = 0
        for slot in slots:
            moves = slot.state_bytes() if slot.name in self.away - self.on_cpu else 0
            if parts[-1] and size + moves > self.bucket_bytes:
                parts.append([])
                size = 0
            parts[-1].append(slot)
            size += moves
        return parts

    def send_home(self, slot: Slot, state: dict[str, Tensor]) -> None:
        """Move a new state to the host if that is where it lives."""
        if slot.name in self.away:
            for key, value in state.items():
                if key != "step" and not self.host.owns(local(value)):
                    state[key] = around(self.host.copy_of(local(value)), value)

    def visit(self, parts: Sequence[Sequence[Slot]], states: States) -> Iterator[Sequence[Slot]]:
        """Each part in turn, its states on the device meanwhile, the next ones on their way."""
        coming = self._bring(parts[0], states) if parts else []
        for index, part in enumerate(parts):
            here, coming = coming, []
            if index + 1 < len(parts):
                coming = self._bring(parts[index + 1], states)
            homes = self._settle(here, states)
            yield part
            self.host.take(self._leave(homes, states))

    def _moving(self, part: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in part if slot.name in self.away and slot.name not in self.on_cpu]

    def _bring(self, part: Sequence[Slot], states: States) -> list:
        keys = [(slot.parameter, key) for slot in self._moving(part) for key in states[slot.parameter] if key != "step"]
        copies, event = self.host.bring([local(states[parameter][key]) for parameter, key in keys])
        return [keys, copies, event]

    def _settle(self, brought: list, states: States) -> dict[tuple[nn.Parameter, str], Tensor]:
        """Put device copies in the place of host tensors, which are returned."""
        keys, copies, event = brought
        self.host.wait(copies, event)
        homes = {}
        for (parameter, key), copy in zip(keys, copies, strict=True):
            homes[parameter, key] = states[parameter][key]
            states[parameter][key] = around(copy, states[parameter][key])
        return homes

    def _leave(self, homes: dict, states: States) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for (parameter, key), home in homes.items():
            pairs.append((local(states[parameter][key]), local(home)))
            states[parameter][key] = home
        return pairs


def choose_slots(slots: Sequence[Slot], fraction: float) -> frozenset[str]:
    """The first slots whose states make up ``fraction`` of all bytes, the last of them included."""
    total, chosen = sum(slot.state_bytes() for slot in slots), []
    size = 0
    for slot in slots:
        if size >= fraction * total:
            break
        chosen.append(slot.name)
        size += slot.state_bytes()
    return frozenset(chosen)
