"""What an optimizer keeps for one parameter, and the pieces in which a step goes over it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.distributed import local_box
from titan_moe.optim.parts import local, locals_of, zeros_like
from titan_moe.optim.rounding import join_master, places, seed_of, split_master, uniform
from titan_moe.optim.storage import Chance, Storage, compute_dtype, rounded

States = Mapping[nn.Parameter, dict[str, Tensor]]
PIECE = 1 << 22
"""Elements that a step holds in its computing precision at a time, more where one slice of a parameter has more."""


@dataclass(frozen=True)
class Slot:
    """A parameter and how its state is stored.

    Args:
        name: global name, which random numbers depend on.
        parameter: plain or DTensor.
        storages: of the moments.
        master: of the copy that updates work on; None: the parameter itself.
        remainders: the parameter is bfloat16, and the 16 bits of its fp32 master that it lacks are kept.
        by_chance: rounding to bfloat16, float16 and float8 is by chance.
    """

    name: str
    parameter: nn.Parameter
    storages: tuple[Storage, ...]
    master: Storage | None
    remainders: bool
    by_chance: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.parameter)

    def new_state(self) -> dict[str, Tensor]:
        """The state before the first step, laid out as the parameter is.

        Raises:
            ConfigError: see ``Storage.new``.
        """
        parameter = self.parameter.detach()
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        for storage in self.storages:
            state |= storage.new(parameter)
        if self.remainders:
            state["remainder"] = zeros_like(parameter, torch.int16)
        if self.master:
            state |= self.master.new(parameter)
            if local(parameter).numel():
                self.master.write(locals_of(state), local(parameter).to(self.compute_dtype))
        return state

    def state_bytes(self) -> int:
        """Bytes of this rank's part of the state."""
        kinds = [*self.storages, *([self.master] if self.master else [])]
        return local(self.parameter).numel() * (2 * self.remainders + sum(kind.bytes_per_element for kind in kinds))

    def pieces(
        self, state: Mapping[str, Tensor], parameter: Tensor | None = None, *, whole: bool = False, **others: Tensor
    ) -> Iterator["Piece"]:
        """The parameter of this rank in slices along its first dim, each with its part of the state.

        Args:
            state: of the parameter.
            parameter: this rank's part, where an update works on a copy of it.
            whole: all in one slice.
            others: more tensors that are laid out as the parameter, such as its gradient.
        """
        parameter = local(self.parameter.detach()) if parameter is None else parameter
        if not parameter.numel():
            return
        if isinstance(self.parameter, DTensor):
            offsets = local_box(self.parameter)[0]
        else:
            offsets = (0,) * parameter.ndim
        values = locals_of({name: value for name, value in state.items() if name != "step"})
        others = locals_of(others)
        if whole or parameter.numel() <= PIECE or not parameter.ndim:
            yield Piece(self, state["step"], offsets, parameter, values, others)
            return
        rows = max(PIECE // parameter[0].numel(), 1)
        for start in range(0, parameter.shape[0], rows):
            size = min(rows, parameter.shape[0] - start)
            yield Piece(
                self,
                state["step"],
                (offsets[0] + start, *offsets[1:]),
                parameter.narrow(0, start, size),
                {name: value.narrow(0, start, size) for name, value in values.items()},
                {name: value.narrow(0, start, size) for name, value in others.items()},
            )


@dataclass
class Piece:
    """Plain tensors that share memory with a slice of a parameter, its state and its gradient."""

    slot: Slot
    step: Tensor
    offsets: tuple[int, ...]
    parameter: Tensor
    state: dict[str, Tensor]
    others: dict[str, Tensor]

    def value(self) -> Tensor:
        """What an update works on, in the computing precision: the master, or the parameter where it has none."""
        if self.slot.remainders:
            return join_master(self.parameter, self.state["remainder"])
        if self.slot.master:
            return self.slot.master.read(self.state, self.slot.compute_dtype)
        return self.parameter.to(self.slot.compute_dtype)

    def store(self, value: Tensor) -> None:
        """Keep an updated ``value()``, and round the parameter from it."""
        if self.slot.remainders:
            upper, lower = split_master(value)
            self.parameter.copy_(upper)
            self.state["remainder"].copy_(lower)
            return
        if self.slot.master:
            self.slot.master.write(self.state, value, self.chance("master"))
            if self.parameter.dtype == torch.bfloat16 and value.dtype == torch.float32:
                # As with remainders, so that both give the same parameters.
                self.parameter.copy_(split_master(value)[0])
            else:
                self.parameter.copy_(value)
        elif value is not self.parameter:
            self.parameter.copy_(rounded(value, self.parameter.dtype, self.chance("parameter")))

    def chance(self, kind: str) -> Chance:
        """Uniform numbers for the elements of this slice, other ones for each kind of state and each step."""
        if not self.slot.by_chance:
            return None

        def draw() -> Tensor:
            index = places(self.slot.parameter.shape, self.offsets, self.parameter.shape, self.parameter.device)
            return uniform(index, self.seed(kind), self.step)

        return draw

    def seed(self, kind: str) -> int:
        """Of the numbers of a kind of state."""
        return seed_of(f"{self.slot.name}/{kind}")

    def row_places(self) -> Tensor:
        """Where each row ``[n]`` of this slice begins in the flattened whole parameter, int64."""
        sizes = (*self.parameter.shape[:-1], 1)
        return places(self.slot.parameter.shape, self.offsets, sizes, self.parameter.device).flatten()
