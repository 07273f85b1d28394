"""Copies between a device and the host, beside the compute: real streams, and the same on a simulated clock.

Both keep the same order: copies of one direction run one after the other, a copy starts once compute has reached the
point where it was asked for and what it must follow has ended, and compute waits only where it is told to. The host
never waits.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Asynchronous copies; an event is whatever the implementation says."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host that copies can reach."""

    def device_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory on the device."""

    def out(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copy to the host, after the event ``after`` where given; returns the event of its end."""

    def back(self, source: Tensor, target: Tensor) -> Any:
        """Copy to the device; returns the event of its end."""

    def wait(self, event: Any) -> None:
        """What compute does from here on comes after ``event``."""


class StreamCopies:
    """On a device with streams, with one for each direction. Not yet run on hardware."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._module = device, torch.get_device_module(device)
        self._out, self._back = self._module.Stream(device), self._module.Stream(device)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def device_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def out(self, source: Tensor, target: Tensor, after: Any) -> Any:
        if after is not None:
            self._out.wait_event(after)
        return self._copy(self._out, source, target)

    def back(self, source: Tensor, target: Tensor) -> Any:
        return self._copy(self._back, source, target)

    def wait(self, event: Any) -> None:
        self._module.current_stream(self.device).wait_event(event)

    def _copy(self, stream: Any, source: Tensor, target: Tensor) -> Any:
        stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()


@dataclass
class Span:
    """One piece of a simulated timeline, in seconds."""

    lane: str
    start: float
    end: float


@dataclass(eq=False)
class _Event:
    end: float
    lane: deque["_Event"]
    run: Callable[[], None] | None
    follows: "_Event | None" = None


@dataclass
class SimulatedCopies:
    """On the CPU: the host is a second arena of the same memory, and the time is that of a clock.

    A copy is made only when something waits for it, or for a later one of its direction: whoever uses or frees memory
    too early gets wrong values.

    Attributes:
        bytes_per_second: of each direction.
        now: where compute is, in seconds; ``compute`` moves it on.
        stalled: seconds for which compute waited.
        timeline: what ran when, where wanted.
    """

    bytes_per_second: float = float("inf")
    now: float = 0.0
    stalled: float = 0.0
    timeline: list[Span] | None = None
    _lanes: dict[str, deque[_Event]] = field(default_factory=lambda: defaultdict(deque))
    _free_at: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def compute(self, seconds: float) -> None:
        """Compute runs for that long."""
        self._note("compute", self.now, self.now + seconds)
        self.now += seconds

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(bytearray(numel * dtype.itemsize), dtype=dtype)

    def device_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def out(self, source: Tensor, target: Tensor, after: _Event | None) -> _Event:
        return self._copy("out", source, target, after)

    def back(self, source: Tensor, target: Tensor) -> _Event:
        return self._copy("back", source, target, None)

    def wait(self, event: _Event) -> None:
        _finish(event)
        self.stalled += max(0.0, event.end - self.now)
        self.now = max(self.now, event.end)

    def _copy(self, name: str, source: Tensor, target: Tensor, follows: _Event | None) -> _Event:
        start = max(self.now, self._free_at[name], 0.0 if follows is None else follows.end)
        end = start + source.nbytes / self.bytes_per_second
        self._free_at[name] = end
        self._note(name, start, end)
        lane = self._lanes[name]
        event = _Event(end, lane, lambda: self._transfer(source, target), follows)
        lane.append(event)
        return event

    def _transfer(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def _note(self, lane: str, start: float, end: float) -> None:
        if self.timeline is not None:
            self.timeline.append(Span(lane, start, end))


class WeightlessCopies(SimulatedCopies):
    """For tensors without values: nothing is copied, and the host's buffers take no memory."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(1, dtype=dtype).expand(numel)

    def _transfer(self, source: Tensor, target: Tensor) -> None:
        pass


def _finish(event: _Event) -> None:
    """Make the copies of its direction up to ``event``, each after what it follows."""
    while event.run is not None:
        first = event.lane[0]
        if first.follows is not None:
            _finish(first.follows)
        first.run()
        first.run = first.follows = None
        event.lane.popleft()
