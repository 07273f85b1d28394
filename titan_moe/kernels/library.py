"""Registering an operator that has a torch and a Triton implementation."""

from collections.abc import Callable

import torch

from titan_moe.kernels.backend import use_triton

_LIBRARY = torch.library.Library("titan_moe", "FRAGMENT")


def operator(schema: str, reference: Callable, kernels: Callable) -> Callable:
    """Define ``titan_moe::schema`` and return it. Not differentiable by itself.

    It is opaque to torch.compile. Fake tensors take the same path as real ones, except that launches do nothing; so
    what the host does around them is checked, and the launches counted, on machines without the device.

    Args:
        schema: of ``torch.library``; the first tensor decides the backend.
        reference: the torch implementation.
        kernels: the Triton one, with the same results. Called only where there is work: tensors are on one device
            and the first one is not empty.
    """
    name = schema.partition("(")[0]

    def implementation(*args):
        first = args[0]
        return (kernels if first.numel() and use_triton(first) else reference)(*args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"titan_moe::{name}", implementation, lib=_LIBRARY)
    return getattr(torch.ops.titan_moe, name)
