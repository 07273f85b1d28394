"""The Mixture-of-Experts layer. Names load on first use, so that reading a configuration does not wait for torch."""

from importlib import import_module

_HOMES = {
    "Dispatcher": "dispatch",
    "Experts": "experts",
    "MoE": "layer",
    "MoEConfig": "config",
    "Router": "router",
    "Routing": "routing",
    "SharedExpert": "shared",
    "finish_step": "balance",
    "set_token_weight": "balance",
    "upcycle": "upcycling",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'titan_moe.moe' has no attribute {name!r}")
    return getattr(import_module(f"titan_moe.moe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
