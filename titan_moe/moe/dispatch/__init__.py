"""How tokens reach their experts. Back ends are found by the name in ``MoEConfig.dispatcher``."""

from titan_moe.errors import ConfigError, nearest
from titan_moe.moe.dispatch.base import Dispatched, Dispatcher
from titan_moe.moe.dispatch.local import LocalDispatcher

__all__ = ["DISPATCHERS", "Dispatched", "Dispatcher", "LocalDispatcher", "build_dispatcher"]

DISPATCHERS: dict[str, type[Dispatcher]] = {"local": LocalDispatcher}


def build_dispatcher(name: str) -> Dispatcher:
    """Raises ConfigError on an unknown name."""
    if name not in DISPATCHERS:
        raise ConfigError(f"moe.dispatcher = {name!r} is not known.{nearest(name, DISPATCHERS)}")
    return DISPATCHERS[name]()
