"""The collectives that a rank issues, noted as they are called."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from titan_moe.fsdp_ep.reduce import OrderedReduceScatter

# Names before and since torch 2.13, and which tensor argument is the rank's own part.
_COLLECTIVES = [
    ("all_gather_into_tensor", "all_gather_single", "gather", 1),
    ("reduce_scatter_tensor", "reduce_scatter_single", "scatter", 0),
    ("all_reduce", "all_reduce", "reduce", 0),
]


@contextmanager
def recorded() -> Iterator[list[tuple[str, tuple[int, ...], int]]]:
    """Within, ``(gather, scatter or reduce, ranks, elements of this rank's part)`` of each call is appended."""
    issued: list[tuple[str, tuple[int, ...], int]] = []

    def noting(name, function, index):
        def call(*args, group=None, **kwargs):
            tensor = [*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))][index]
            issued.append((name, tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), tensor.numel()))
            return function(*args, group=group, **kwargs)

        return call

    with ExitStack() as patches:
        for old, new, name, index in _COLLECTIVES:
            called = new if hasattr(dist, new) else old
            patches.enter_context(mock.patch.object(dist, called, noting(name, getattr(dist, called), index)))
        # On CPUs FSDP's reduce-scatter is ours.
        call = noting("scatter", OrderedReduceScatter.__call__, 1)
        patches.enter_context(mock.patch.object(OrderedReduceScatter, "__call__", call))
        yield issued
