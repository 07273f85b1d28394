"""A method of a module that runs again in the backward pass, so that what it made need not be kept (section 4.1.4).

Nothing that the method saved is kept, and nothing that its callers saved of its results either: both are made again
by one run, at the first moment that one of them is asked for. A result is kept by nobody, so its memory goes when its
last user has run forward, and comes back just before that user's backward (Megatron's output-discarding checkpoint,
here through references alone: no storage is resized, so nobody can be left with an empty tensor). The run ends as soon
as it has made what is wanted: a last linear whose result nobody kept does not run twice.

Of the run before, it takes the random numbers, autocast, the parameters that the module saw and, unless told
otherwise, the results of functional collectives, which are not sent again.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from titan_moe.distributed import world_size
from titan_moe.errors import TrainingError
from titan_moe.plugins.saved import Packed, SavedTensors, Tape, plain_part, unpack


class Region:
    """How one method is recomputed.

    Attributes:
        name: of the module, for messages.
        discard: whether results are made again too. Not those of whole layers: each would need the layer before it.
        repeats_communication: whether functional collectives run again.
        draws: whether the method may draw random numbers.
    """

    def __init__(
        self,
        name: str,
        saved: SavedTensors,
        *,
        discard: bool = True,
        repeats_communication: bool = False,
        draws: bool = True,
    ) -> None:
        self.name, self.saved, self.discard = name, saved, discard
        self.repeats_communication, self.draws = repeats_communication, draws

    def around(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The method, for ``titan_moe.modules.wrap``."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler keeps what is cheapest to keep; it knows this as the border of what it may drop.
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)
        tape = self.saved.tape
        if tape is None or tape.recording:
            return inner(*args, **kwargs)
        return _Recipe(self, module, inner).record(tape, args, kwargs)


class _Slot:
    """Stands for a tensor that was saved within a region."""

    __slots__ = ("__weakref__", "like", "recipe", "value")

    def __init__(self, recipe: "_Recipe", tensor: Tensor) -> None:
        self.recipe, self.like, self.value = recipe, (tensor.shape, tensor.dtype), None

    def get(self) -> Tensor:
        if self.value is None:
            self.recipe.restore()
        return self.value


class _Cell:
    """Stands for the storage of one result of a region."""

    __slots__ = ("__weakref__", "recipe", "value")

    def __init__(self, recipe: "_Recipe") -> None:
        self.recipe, self.value = recipe, None

    def base(self) -> Tensor:
        if self.value is None:
            self.recipe.restore()
        return self.value


class _Enough(Exception):
    """All that is wanted of a run has been made."""


class _Recipe:
    """One run of a region, and how to repeat it.

    It knows what stands for its tensors by weak references, and is kept alive by them: what no node of the graph holds
    any more is not made again, and what was made lives as long as its holder.
    """

    def __init__(self, region: Region, module: nn.Module, inner: Callable[..., Any]) -> None:
        self.region, self.module, self.inner = region, module, inner
        self.slots: list[weakref.ref[_Slot]] = []
        self.cells: weakref.WeakValueDictionary[int, _Cell] = weakref.WeakValueDictionary()
        self.sent: list[tuple[int, Any]] = []

    def record(self, tape: Tape, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The first run."""
        leaves, self.structure = tree_flatten((args, kwargs))
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        self.surroundings = _Surroundings(self.module, device, draws=self.region.draws)
        self.inputs = [_Input(leaf, tape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        keeps_sent = not self.region.repeats_communication and world_size() > 1
        tape.recording = True
        try:
            with ExitStack() as stack:
                stack.enter_context(saved_tensors_hooks(self._slot, unpack))
                if keeps_sent:
                    stack.enter_context(_Collectives(lambda run: self._remember(run())))
                results = self.inner(*args, **kwargs)
        finally:
            tape.recording = False
        # What was sent after the last saved tensor is not wanted again, unless as part of a result.
        needed = [result for before, result in self.sent if before < len(self.slots)]
        if self.region.discard and len(needed) == len(self.sent):
            self._give_up(results, tape, leaves)
        self.sent = needed
        return results

    def _slot(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def _remember(self, result: Any) -> Any:
        self.sent.append((len(self.slots), result))
        return result

    def _give_up(self, results: Any, tape: Tape, inputs: list[Any]) -> None:
        """Let the tape know which storages a repetition makes."""
        own = {_storage(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        for number, result in enumerate(tree_leaves(results)):
            if isinstance(result, Tensor) and (storage := _storage(result)) not in own:
                own.add(storage)
                tape.made(result, lambda number=number: self._cell(number))

    def _cell(self, number: int) -> _Cell:
        cell = self.cells.get(number)
        if cell is None:
            cell = self.cells[number] = _Cell(self)
        return cell

    def restore(self) -> None:
        """Run again, and give each living slot and cell its tensor.

        Raises:
            TrainingError: the method saved other tensors than before.
        """
        slots = {i: slot for i, ref in enumerate(self.slots) if (slot := ref()) is not None}
        cells = dict(self.cells)
        wanted = set(slots)
        made = 0

        def pack(tensor: Tensor) -> int:
            nonlocal made
            number, made = made, made + 1
            if number in wanted:
                slot = slots[number]
                if slot.like != (tensor.shape, tensor.dtype):
                    raise self._differs(f"tensor {number} is {_describe(tensor.shape, tensor.dtype)}", slot)
                slot.value = tensor.detach()
                wanted.discard(number)
                if not wanted and not cells:
                    raise _Enough
            # The graph of this run is never used.
            return number

        args, kwargs = tree_unflatten([_taken(leaf) for leaf in self.inputs], self.structure)
        sent = iter(self.sent)
        try:
            with self.surroundings.again(), saved_tensors_hooks(pack, _unused), ExitStack() as stack:
                if self.sent:
                    stack.enter_context(_Collectives(lambda run: next(sent)))
                results = tree_leaves(self.inner(*args, **kwargs))
        except _Enough:
            results = []
        if wanted:
            raise self._differs(f"{made} tensors", slots[min(wanted)])
        for number, cell in cells.items():
            cell.value = plain_part(results[number]).detach()
        # Nothing new can be asked for: whoever could is among those served now.
        del self.inputs, self.surroundings, self.inner
        self.sent = []

    def _differs(self, what: str, slot: _Slot) -> TrainingError:
        return TrainingError(
            f"recompute of {self.region.name}: its second run saved {what}, where its first saved "
            f"{len(self.slots)} with {_describe(*slot.like)}. It must do the same each time: leave it out of "
            "activation_checkpoint.targets."
        )


class _Input:
    """A tensor that a region was called with."""

    def __init__(self, tensor: Tensor, tape: Tape) -> None:
        self.requires_grad = tensor.requires_grad
        # A parameter stays itself: FSDP fills and empties it.
        self.packed: Tensor | Packed = tensor if isinstance(tensor, nn.Parameter) else tape.pack(tensor)

    def take(self) -> Tensor:
        if isinstance(self.packed, nn.Parameter):
            return self.packed
        return unpack(self.packed).detach().requires_grad_(self.requires_grad)


class _Surroundings:
    """What a method sees besides its arguments."""

    def __init__(self, module: nn.Module, device: str, *, draws: bool) -> None:
        self.module, self.device = module, device
        # Under tensor parallelism a module sees the local parts of its parameters.
        self.parameters = dict(module._parameters)
        self.modes = _get_current_function_mode_stack()
        self.autocast = None
        if torch.amp.is_autocast_available(device):
            self.autocast = {
                "enabled": torch.is_autocast_enabled(device),
                "dtype": torch.get_autocast_dtype(device),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
        self.rng = _random_states(device) if draws else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, all is as it was."""
        if isinstance(self.module, FSDPModule):
            # A user of its result may ask before its own backward begins.
            self.module.unshard()
        parameters = dict(self.module._parameters)
        states = None if self.rng is None else _random_states(self.device)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device, **self.autocast))
            for mode in self.modes:
                stack.enter_context(mode)
            self.module._parameters.update(self.parameters)
            try:
                if states is not None:
                    _set_random_states(self.device, self.rng)
                yield
            finally:
                self.module._parameters.update(parameters)
                if states is not None:
                    _set_random_states(self.device, states)


class _Collectives(TorchDispatchMode):
    """Passes functional collectives through a function, which may run them or not."""

    def __init__(self, through: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self.through = through

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # Wrappers first, so that what they do with their parts is seen.
            return NotImplemented

        def run() -> Any:
            return func(*args, **(kwargs or {}))

        return self.through(run) if func.namespace == "_c10d_functional" else run()


def _taken(leaf: Any) -> Any:
    return leaf.take() if isinstance(leaf, _Input) else leaf


def _unused(packed: int) -> Tensor:
    raise AssertionError("the graph of a recompute is never walked")


def _storage(tensor: Tensor) -> int:
    part = plain_part(tensor)
    return id(tensor) if part is None else part.untyped_storage()._cdata


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _random_states(device: str) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state())
    return states


def _set_random_states(device: str, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1])
