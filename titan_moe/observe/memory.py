"""Which tensors are alive, who made them, and which of them stood at the peak."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker


@dataclass(frozen=True)
class Held:
    """One storage: what it was made as, and where."""

    module: str
    """The innermost module whose forward made it; ``backward`` and ``outside`` for the rest."""
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class TensorTracker(TorchDispatchMode):
    """Within, follows every storage that operators make, on any device, meta included.

    What was there before is not counted. Each storage counts once, whatever lies in it.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """
        Args:
            model: ``alive`` leaves out the storages of its parameters and buffers, which FSDP makes anew.
        """
        super().__init__()
        self._modules = ModuleTracker()
        self._model = nn.Module() if model is None else model
        self._alive: dict[int, tuple[int, weakref.ref]] = {}
        self._made: list[Held] = []
        # The number of a storage when it is made, ~number when it is gone.
        self._events: list[int] = []

    def __enter__(self) -> "TensorTracker":
        self._modules.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and _key(result) not in given:
                self._see(result, func)
        return results

    def _see(self, tensor: Tensor, func: torch._ops.OpOverload) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        number = len(self._made)
        self._made.append(
            Held(self._where(), func.name().split("::")[-1], tuple(tensor.shape), tensor.dtype, storage.nbytes())
        )
        self._events.append(number)
        self._alive[key] = number, weakref.ref(storage, partial(self._gone, key, number))

    def _gone(self, key: int, number: int, _: object) -> None:
        self._events.append(~number)
        if key in self._alive and self._alive[key][0] == number:
            del self._alive[key]

    def _where(self) -> str:
        # The tracker's names begin with the class of the root.
        inside = [name for name in self._modules.parents if name != "Global"]
        name = max(inside, key=lambda name: name.count("."), default="outside").partition(".")[2]
        return "backward" if self._modules.is_bw else name or "outside"

    def alive(self) -> list[Held]:
        """What is alive now, in the order it was made, and as large as it is now: FSDP empties what it gathered."""
        own = {_key(_local(t)) for t in chain(self._model.parameters(), self._model.buffers())}
        there = sorted((number, ref()) for key, (number, ref) in self._alive.items() if key not in own)
        sizes = [(self._made[number], storage.nbytes()) for number, storage in there]
        return [replace(made, nbytes=nbytes) for made, nbytes in sizes if nbytes]

    def peak(self) -> list[Held]:
        """What was alive when most bytes were."""
        total = most = at = 0
        for i, event in enumerate(self._events):
            total += self._made[event].nbytes if event >= 0 else -self._made[~event].nbytes
            if total > most:
                most, at = total, i + 1
        there: set[int] = set()
        for event in self._events[:at]:
            there.add(event) if event >= 0 else there.remove(~event)
        return [self._made[number] for number in sorted(there)]


def total_bytes(held: Iterable[Held]) -> int:
    """Sum over storages."""
    return sum(one.nbytes for one in held)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
