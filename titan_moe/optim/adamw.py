"""AdamW (arXiv 1711.05101) on state that may be stored in other dtypes than it is computed in."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_moe.kernels.adamw import Hyper, Stored, fused_adamw
from titan_moe.kernels.backend import use_triton
from titan_moe.optim.parts import locals_of
from titan_moe.optim.slot import PIECE, Piece, Slot
from titan_moe.optim.storage import Storage, storage_for


def moments(parameter: Tensor, exp_avg_dtype: str | None, exp_avg_sq_dtype: str | None) -> tuple[Storage, ...]:
    """The storages of the first and the second moment."""
    return (
        storage_for("exp_avg", exp_avg_dtype, parameter),
        storage_for("exp_avg_sq", exp_avg_sq_dtype, parameter, square=True),
    )


@dataclass(frozen=True)
class Task:
    """One parameter to update: plain tensors, which may be copies on another device than the parameter's."""

    slot: Slot
    state: dict[str, Tensor]
    parameter: Tensor
    grad: Tensor


def adamw_step(tasks: Iterable[Task], group: Mapping[str, Any]) -> None:
    """One step of each task.

    Reads and writes each tensor once where torch's own update can work on it in place. What is stored in another
    dtype is converted for ``PIECE`` elements at a time.

    Args:
        tasks: of slots whose moments are those of ``moments``.
        group: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``foreach`` and ``fused``.
    """
    rest = []
    for task in tasks:
        if group["fused"] and _has_kernel(task):
            _run_kernel(task, group)
        else:
            rest.append(task)
    pieces = chain.from_iterable(task.slot.pieces(task.state, task.parameter, grad=task.grad) for task in rest)
    for batch in _batches(pieces):
        dtype = batch[0].slot.compute_dtype
        values = [piece.value() for piece in batch]
        read = [[storage.read(piece.state, dtype) for storage in piece.slot.storages] for piece in batch]
        first, second = map(list, zip(*read, strict=True))
        beta1, beta2 = group["betas"]
        # All pieces of a parameter share one count, and torch's update adds to what it is given.
        steps = torch.stack([piece.step for piece in batch]) - 1
        if group["fused"]:
            steps = steps.to(batch[0].parameter.device, non_blocking=True)
        adamw(
            values,
            [piece.others["grad"].to(dtype) for piece in batch],
            first,
            second,
            [],
            list(steps),
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, value, updated in zip(batch, values, zip(first, second, strict=True), strict=True):
            for storage, moment in zip(piece.slot.storages, updated, strict=True):
                storage.write(piece.state, moment, piece.chance(storage.name))
            piece.store(value)


def _has_kernel(task: Task) -> bool:
    """Whether a kernel converts and updates at once; plain fp32 is left to torch's, which takes many at a time."""
    slot, parameter = task.slot, task.parameter
    tensors = [parameter, *locals_of(task.state).values()]
    plain = all(tensor.dtype == torch.float32 for tensor in tensors)
    return (
        parameter.numel() > 0
        and not plain
        and slot.compute_dtype == torch.float32
        and parameter.dtype != torch.float16
        and (slot.master is None or slot.master.scaled is None)
        and all(tensor.is_contiguous() for tensor in tensors)
        and (all(tensor.dtype != torch.float8_e4m3fn for tensor in tensors) or _has_float8(parameter.device))
        and use_triton(parameter)
    )


def _has_float8(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _run_kernel(task: Task, group: Mapping[str, Any]) -> None:
    slot, state = task.slot, locals_of(task.state)
    (piece,) = slot.pieces(task.state, task.parameter, whole=True)
    beta1, beta2 = group["betas"]
    hyper = Hyper(int(task.state["step"]), group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    stored = [
        Stored(state[storage.name], state.get(f"{storage.name}_scale"), piece.seed(storage.name))
        for storage in slot.storages
    ]
    fused_adamw(
        task.parameter,
        task.grad,
        *stored,
        hyper,
        master=state.get("master"),
        remainder=state.get("remainder"),
        row_places=piece.row_places() if slot.by_chance else None,
        seed=piece.seed("parameter"),
    )


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces on one device, of one computing precision and at most ``PIECE`` elements together, but at least one."""
    batch: list[Piece] = []
    elements = 0
    for piece in pieces:
        size = piece.parameter.numel()
        if batch and (elements + size > PIECE or _kind(piece) != _kind(batch[0])):
            yield batch
            batch, elements = [], 0
        batch.append(piece)
        elements += size
    if batch:
        yield batch


def _kind(piece: Piece) -> tuple[torch.dtype, torch.device]:
    return piece.slot.compute_dtype, piece.parameter.device
