"""How tokens reach their experts. Back ends are found by the name in ``MoEConfig.dispatcher``."""

import torch.distributed as dist

from titan_moe.errors import ConfigError, nearest
from titan_moe.moe.dispatch.allgather import AllGatherDispatcher
from titan_moe.moe.dispatch.alltoall import AllToAllDispatcher
from titan_moe.moe.dispatch.base import Dispatched, Dispatcher, GroupDispatcher, expert_range
from titan_moe.moe.dispatch.flex import DeepEPDispatcher, HybridEPDispatcher, check_package, load_deep_ep
from titan_moe.moe.dispatch.local import LocalDispatcher

__all__ = [
    "GROUP_DISPATCHERS",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DeepEPDispatcher",
    "Dispatched",
    "Dispatcher",
    "GroupDispatcher",
    "HybridEPDispatcher",
    "LocalDispatcher",
    "build_dispatcher",
    "check_package",
    "expert_range",
    "load_deep_ep",
]

GROUP_DISPATCHERS: dict[str, type[GroupDispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "deepep": DeepEPDispatcher,
    "hybridep": HybridEPDispatcher,
}


def build_dispatcher(
    name: str, *, num_experts: int, ep_group: dist.ProcessGroup | None = None, etp_size: int = 1, **options
) -> Dispatcher:
    """The dispatcher ``name``; whatever the name, nothing travels where a single rank holds all experts.

    Args:
        name: a choice of ``MoEConfig.dispatcher``.
        num_experts: E, over all ranks.
        ep_group: the flattened (ep, etp) group, etp fastest; None: one rank.
        etp_size: ranks over which each expert's hidden dim is split.
        options: the back end's own.

    Raises:
        ConfigError: an unknown name, ``local`` with experts on several ranks, or a package that is missing.
    """
    if name != "local" and name not in GROUP_DISPATCHERS:
        raise ConfigError(f"moe.dispatcher = {name!r} is not known.{nearest(name, ['local', *GROUP_DISPATCHERS])}")
    size = 1 if ep_group is None else dist.get_world_size(ep_group)
    if size == 1:
        return LocalDispatcher()
    if name == "local":
        raise ConfigError(
            f"moe.dispatcher = 'local' with experts spread over {size} ranks: tokens have to travel. "
            f"Set moe.dispatcher = 'alltoall', or both expert_parallel_degree and expert_tensor_parallel_degree = 1."
        )
    return GROUP_DISPATCHERS[name](num_experts, ep_group, etp_size, **options)
