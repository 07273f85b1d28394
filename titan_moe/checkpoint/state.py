"""A model's and an optimizer's state as one flat dict of tensors by global name, and the checks before loading.

``model.<parameter or persistent buffer>``, ``optim.<parameter>.<moment or step>``, ``rank.<r>.<name>``.
"""

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_moe.errors import CheckpointError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_SHOWN = 8


def global_name(name: str) -> str:
    """A parameter's name without what compile and recompute wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose names are global: a list of pipeline stages has them in its elements."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, sharing memory with the model; shared ones under their first name.

    Of a parameter that several pipeline stages of this rank hold a copy of, the first; see ``copies``.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for part in parts_of(model):
        for name, value in part.state_dict(keep_vars=True).items():
            assert isinstance(value, torch.Tensor), f"{name} is extra state of type {type(value).__name__}"
            if id(value) not in seen:
                seen.add(id(value))
                tensors.setdefault(f"model.{global_name(name)}", value.detach())
    return tensors


def copies(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """``(first, other)`` of each parameter that several pipeline stages of this rank hold under one name."""
    first = parameters(model)
    pairs = []
    for part in parts_of(model):
        for name, parameter in part.named_parameters():
            if parameter is not first[global_name(name)]:
                pairs.append((first[global_name(name)], parameter))
    return pairs


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Moments and step counts by parameter name; a parameter that never had a gradient has none."""
    tensors = {}
    for name, parameter in parameters(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert isinstance(value, torch.Tensor), f"optimizer state {key} of {name} is not a tensor"
            tensors[f"optim.{name}.{key}"] = value.detach()
    return tensors


def without_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[nn.Parameter, dict[str, torch.Tensor]] | None = None,
) -> list[str]:
    """Names of the parameters that ``optimizer`` trains and ``state`` (default: its own) does not have."""
    state = optimizer.state if state is None else state
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in parameters(model).items() if parameter in trained and not state.get(parameter)]


def rank_key(rank: int, name: str) -> str:
    """The name of what ``rank`` keeps for itself."""
    return f"rank.{rank}.{name}"


def new_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, TensorStorageMetadata]
) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
    """Empty optimizer state for the parameters that a checkpoint has some for; what it consists of is checked later.

    An optimizer that stores state in its own ways says how with ``new_state(parameter)``; of any other, a state has
    the entries of the checkpoint, each like the parameter.
    """
    by_name = parameters(model)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    for key, entry in saved.items():
        name, _, moment = key.removeprefix("optim.").rpartition(".")
        if not key.startswith("optim.") or (parameter := by_name.get(name)) not in groups:
            continue
        if hasattr(optimizer, "new_state"):
            if parameter not in state:
                state[parameter] = optimizer.new_state(parameter)
            continue
        if moment == "step":
            on_device = groups[parameter].get("fused") or groups[parameter].get("capturable")
            device = parameter.device if on_device else torch.device("cpu")
            value = torch.zeros((), dtype=entry.properties.dtype, device=device)
        else:
            value = torch.zeros_like(parameter, requires_grad=False)
        state.setdefault(parameter, {})[moment] = value
    return state


def named_state(model: nn.Module, state: dict[nn.Parameter, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """``new_optimizer_state``'s tensors under their names in the checkpoint."""
    names = {parameter: name for name, parameter in parameters(model).items()}
    return {f"optim.{names[p]}.{key}": value for p, entries in state.items() for key, value in entries.items()}


def check_fit(
    wanted: dict[str, torch.Tensor],
    saved: dict[str, TensorStorageMetadata],
    ignored_prefixes: tuple[str, ...],
    elsewhere: Collection[str] = (),
) -> None:
    """Compare names, shapes and dtypes.

    Args:
        wanted: what is to be loaded.
        saved: what the checkpoint has.
        ignored_prefixes: names that the checkpoint may have on top.
        elsewhere: names of model tensors that other ranks load, as in a pipeline; what belongs to them is no surplus.

    Raises:
        CheckpointError: one line listing every kind of mismatch.
    """
    surplus = [name for name in saved.keys() - wanted.keys() if not name.startswith(ignored_prefixes)]
    unexpected = sorted(name for name in surplus if model_name(name) not in elsewhere)
    problems = [("missing", sorted(wanted.keys() - saved.keys())), ("unexpected", unexpected)]
    shapes, dtypes = [], []
    for name in sorted(wanted.keys() & saved.keys()):
        want, have = wanted[name], saved[name]
        if tuple(want.shape) != tuple(have.size):
            shapes.append(f"{name} {list(have.size)} in the checkpoint, {list(want.shape)} in the model")
        elif want.dtype != have.properties.dtype:
            dtypes.append(f"{name} {have.properties.dtype} in the checkpoint, {want.dtype} in the model")
    problems += [("of another shape", shapes), ("of another dtype", dtypes)]
    lines = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in problems if names]
    if lines:
        raise CheckpointError("the checkpoint does not fit the model; " + "; ".join(lines))


def model_name(name: str) -> str:
    """The name of the model's tensor that an entry of a checkpoint belongs to; another entry's own name."""
    return f"model.{name.removeprefix('optim.').rpartition('.')[0]}" if name.startswith("optim.") else name


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by global name; of those that several stages of this rank hold, the first."""
    found: dict[str, nn.Parameter] = {}
    for part in parts_of(model):
        for name, parameter in part.named_parameters():
            found.setdefault(global_name(name), parameter)
    return found


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
