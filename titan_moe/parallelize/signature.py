"""Whether all ranks are about to do the same: a cheap check before the first collective that would hang.

Ranks started from different configurations, versions or code make different groups or send different shapes, and
then wait for each other until a timeout that says nothing. Here each rank leaves a short hash in the store that the
world was made with; only ranks that differ ever send what they differ in. No process group takes part.
"""

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from titan_moe import __version__
from titan_moe.config.job import JobConfig
from titan_moe.distributed import is_distributed, rank, world_size
from titan_moe.errors import TrainingError

_MAY_DIFFER = ("job.config_file", "job.description", "job.print_config")
_SHOWN = 4


def signature_of_config(config: JobConfig) -> dict[str, str]:
    """Every resolved key and its value, and the versions that the ranks run."""
    entries = {"torch": torch.__version__, "titan_moe": __version__, "processes": str(world_size())}
    for section, keys in asdict(config).items():
        entries |= {f"{section}.{name}": repr(value) for name, value in keys.items()}
    return {name: value for name, value in entries.items() if name not in _MAY_DIFFER}


def signature_of_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Global shape, dtype and sharding of every parameter by name; the same on all ranks of a pipeline stage."""
    return {name: _describe(parameter) for name, parameter in parameters}


def _describe(parameter: nn.Parameter) -> str:
    text = f"{list(parameter.shape)} {parameter.dtype}".replace("torch.", "")
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        text += f", {parameter.placements} on {axes}"
    return text if parameter.requires_grad else f"{text}, frozen"


def check_signature(what: str, entries: Mapping[str, str], *, group: int = 0, timeout_seconds: float) -> None:
    """Raise on all ranks unless the ranks of each ``group`` have equal ``entries``. All ranks call it alike.

    Args:
        what: of what the entries are, such as ``configuration``; part of the message.
        entries: name to value.
        group: ranks that give the same number are compared; pipeline stages, say.
        timeout_seconds: how long to wait for the others.

    Raises:
        TrainingError: naming the ranks that differ from the most, and in what; or that did not come.
    """
    if not is_distributed() or world_size() == 1 or dist.get_backend() == "fake":
        return
    world, own = world_size(), rank()
    store = _Board(what, timeout_seconds)
    text = json.dumps(entries, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    store.put(f"digest/{own}", [group, digest])
    if own == 0:
        digests, missing = store.get_all([f"digest/{r}" for r in range(world)])
        if missing:
            verdict: Any = {"missing": missing}
        else:
            verdict = _odd_ones_out(digests)
        store.put("verdict", verdict)
    else:
        # Rank 0 may use up its time waiting for a rank that never comes.
        verdict = store.get("verdict", 2 * timeout_seconds, f"rank 0 did not compare the ranks' {what}")
    if verdict.get("missing"):
        raise TrainingError(
            f"{_ranks(verdict['missing'])} did not come to compare the {what} within {timeout_seconds:g} s: see their "
            "own messages, or raise comm.init_timeout_seconds"
        )
    if not verdict["pairs"]:
        return
    involved = {r for pair in verdict["pairs"] for r in pair}
    if own in involved:
        store.put(f"entries/{own}", [socket.gethostname(), entries])
    if own == 0:
        store.put("message", _message(what, verdict, {r: store.get(f"entries/{r}", timeout_seconds) for r in involved}))
    raise TrainingError(store.get("message", 2 * timeout_seconds))


def _odd_ones_out(digests: list[list]) -> dict[str, Any]:
    """``others``: all ranks that differ from most of their group; ``pairs``: of each kind one, and one it is unlike."""
    by_group: dict[int, Counter] = {}
    for group, digest in digests:
        by_group.setdefault(group, Counter())[digest] += 1
    others: list[int] = []
    pairs: list[tuple[int, int]] = []
    for group, counts in by_group.items():
        ranks = [r for r, (of, _) in enumerate(digests) if of == group]
        usual, _ = counts.most_common(1)[0]
        reference = next(r for r in ranks if digests[r][1] == usual)
        seen = {usual}
        for r in ranks:
            if digests[r][1] != usual:
                others.append(r)
            if digests[r][1] not in seen:
                seen.add(digests[r][1])
                pairs.append((reference, r))
    return {"others": sorted(others), "pairs": pairs[:_SHOWN]}


def _message(what: str, verdict: dict[str, Any], published: dict[int, list]) -> str:
    lines = []
    for reference, odd in verdict["pairs"]:
        (_, want), (host, have) = published[reference], published[odd]
        names = [name for name in sorted(want.keys() | have.keys()) if want.get(name) != have.get(name)]
        shown = [f"{name} is {have.get(name, 'absent')}, not {want.get(name, 'absent')}" for name in names[:_SHOWN]]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        lines.append(f"on rank {odd} ({host}) {'; '.join(shown)}{more} as on rank {reference}")
    verb = "differs from the others in its" if len(verdict["others"]) == 1 else "differ from the others in their"
    return f"{_ranks(verdict['others'])} {verb} {what}: {'. '.join(lines)}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[: 2 * _SHOWN]))
    more = f" and {len(ranks) - 2 * _SHOWN} more" if len(ranks) > 2 * _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


class _Board:
    """JSON values in the world's store under a prefix of this one check."""

    def __init__(self, what: str, timeout_seconds: float) -> None:
        self.store = distributed_c10d._get_default_store()
        self.timeout = timeout_seconds
        # A rank enters the next check of this name only after all have entered this one.
        arrived = self.store.add(f"signature/{what}/arrived", 1)
        self.prefix = f"signature/{what}/{(arrived - 1) // world_size()}"

    def put(self, key: str, value: Any) -> None:
        self.store.set(f"{self.prefix}/{key}", json.dumps(value))

    def get(self, key: str, timeout_seconds: float, failure: str = "a rank went silent") -> Any:
        name = f"{self.prefix}/{key}"
        try:
            self.store.wait([name], timedelta(seconds=timeout_seconds))
        except dist.DistStoreError as error:
            raise TrainingError(f"{failure} within {timeout_seconds:g} s") from error
        return json.loads(self.store.get(name))

    def get_all(self, keys: list[str]) -> tuple[list[Any], list[int]]:
        """The values of ``keys``, and the indices of those that did not come in time."""
        names = [f"{self.prefix}/{key}" for key in keys]
        try:
            self.store.wait(names, timedelta(seconds=self.timeout))
        except dist.DistStoreError:
            return [], [i for i, name in enumerate(names) if not self.store.check([name])]
        return [json.loads(value) for value in self.store.multi_get(names)], []
