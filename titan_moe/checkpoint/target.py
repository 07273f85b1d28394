"""Loading one checkpoint into a model and an optimizer: all of it or nothing."""

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_moe.checkpoint import files, state
from titan_moe.checkpoint.agree import on_all_ranks
from titan_moe.checkpoint.index import METADATA, parse_index
from titan_moe.checkpoint.parts import Part, parts_of_rank
from titan_moe.checkpoint.tensors import read_tensors
from titan_moe.distributed import gather_objects, rank, world_size
from titan_moe.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """What ``Checkpointer.load`` found besides the model's and the optimizer's tensors.

    ``rank_tensors`` is empty when the checkpoint was saved by another number of processes.
    """

    step: int
    extra: dict[str, Any]
    rank_tensors: dict[str, torch.Tensor]
    folder: Path


class Target:
    """Reads a checkpoint beside the model, which changes in ``commit`` alone.

    Args:
        model: whose tensors are to be replaced.
        optimizer: whose state is to be replaced, or None.
        exclude: shell patterns of model tensors to leave alone, with their optimizer state.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, exclude: Collection[str] = ()
    ) -> None:
        self._model, self._optimizer = model, optimizer
        # In a pipeline, ranks have different names.
        named = gather_objects(list(state.model_tensors(model)))
        self._everywhere = {name for names in named for name in names}
        self._patterns = list(exclude)

    def read(self, folder: Path, manifest: files.Manifest) -> str:
        """Read all that this rank needs; every rank calls it.

        Returns:
            paths of damaged files; when there are none, ``commit`` may be called.

        Raises:
            CheckpointError: on every rank, when the checkpoint does not fit or cannot be read.
        """
        action = f"loading {folder} failed"
        damaged = on_all_ranks(action, lambda: self._prepare(folder, manifest))
        if any(damaged):
            return ", ".join(sorted({path for path in damaged if path}))
        tensors = {name: entry for name, entry in manifest.files.items() if name not in (METADATA, files.STATE)}
        return read_tensors(folder, self._index, tensors, self._parts)

    def commit(self, folder: Path, manifest: files.Manifest) -> Loaded:
        """Put what was read in its place."""
        pairs = state.copies(self._model)
        with torch.no_grad():
            for name, part in parts_of_rank(self._tensors).items():
                part.local.copy_(self._parts[name].local)
            for first, other in pairs:
                other.copy_(first)
        if self._optimizer is not None:
            kept = {p: values for p, values in self._optimizer.state.items() if p in self._left_alone}
            self._optimizer.state.clear()
            self._optimizer.state.update(kept | self._optimizer_state)
            for first, other in pairs:
                if first in self._optimizer_state:
                    copied = {key: value.clone() for key, value in self._optimizer_state[first].items()}
                    self._optimizer.state[other] = copied
        return Loaded(manifest.step, self._about["extra"], self._rank_tensors, folder)

    def _prepare(self, folder: Path, manifest: files.Manifest) -> str | None:
        """Work out what to read into what, all checked to fit; returns the path of a damaged file."""
        try:
            about = files.parse_json(files.read_checked(folder, manifest, files.STATE), folder / files.STATE)
            content = files.read_checked(folder, manifest, METADATA)
        except files.Damaged as damaged:
            return str(damaged)
        self._about = _check_about(about, folder / files.STATE)
        sizes = {name: size for name, (size, _) in manifest.files.items()}
        self._index = parse_index(content, str(folder / METADATA), sizes)
        saved = self._index.state_dict_metadata
        excluded = self._excluded(saved)
        self._tensors = {
            name: tensor for name, tensor in state.model_tensors(self._model).items() if name not in excluded
        }
        # Host memory beside the model, so that a damaged file does not leave half of another model in it.
        self._parts = {
            name: Part(torch.empty_like(part.local, device="cpu"), part.offsets, part.shape)
            for name, part in parts_of_rank(self._tensors).items()
        }
        wanted: dict[str, torch.Tensor] = dict(self._tensors)
        if self._optimizer is not None:
            optimizer_tensors = self._prepare_optimizer(saved, excluded)
            wanted |= optimizer_tensors
            self._parts |= parts_of_rank(optimizer_tensors)
        ignored = ("rank.",) if self._optimizer is not None else ("rank.", "optim.")
        fitting = {name: entry for name, entry in saved.items() if state.model_name(name) not in excluded}
        state.check_fit(wanted, fitting, ignored, self._everywhere)
        self._rank_tensors = self._own_tensors(saved)
        own = {state.rank_key(rank(), name): value for name, value in self._rank_tensors.items()}
        self._parts |= parts_of_rank(own)
        return None

    def _excluded(self, saved: dict[str, TensorStorageMetadata]) -> set[str]:
        known = self._everywhere | {name for name in saved if name.startswith("model.")}
        excluded: set[str] = set()
        for pattern in self._patterns:
            found = fnmatch.filter(known, pattern)
            if not found:
                raise CheckpointError(f"exclude {pattern!r} matches no tensor; names look like {min(known)!r}")
            excluded.update(found)
        return excluded

    def _prepare_optimizer(
        self, saved: dict[str, TensorStorageMetadata], excluded: set[str]
    ) -> dict[str, torch.Tensor]:
        if not self._about["has_optimizer"]:
            raise CheckpointError(
                "it holds no optimizer state: it was saved without an optimizer. To go on without, add 'optimizer' to "
                "checkpoint.exclude_from_loading"
            )
        names = {name for name in saved if state.model_name(name) not in excluded}
        self._optimizer_state = state.new_optimizer_state(
            self._model, self._optimizer, {name: saved[name] for name in names}
        )
        lacking = set(state.without_optimizer_state(self._model, self._optimizer, self._optimizer_state))
        absent = {
            name for name in lacking - set(self._about["without_optimizer_state"]) if f"model.{name}" not in excluded
        }
        if absent:
            raise CheckpointError(f"it lacks the optimizer state of {', '.join(sorted(absent)[:8])}")
        self._left_alone = {
            parameter for name, parameter in state.parameters(self._model).items() if f"model.{name}" in excluded
        }
        return state.named_state(self._model, self._optimizer_state)

    def _own_tensors(self, saved: dict[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
        """What this rank kept for itself, when there are as many ranks as there were."""
        if self._about["world_size"] != world_size():
            return {}
        prefix = state.rank_key(rank(), "")
        return {
            name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in saved.items()
            if name.startswith(prefix)
        }


def _check_about(about: Any, path: Path) -> dict[str, Any]:
    keys = {"step", "world_size", "has_optimizer", "without_optimizer_state", "extra"}
    if not isinstance(about, dict) or not keys <= about.keys():
        raise CheckpointError(f"{path} is not a checkpoint's state")
    return about
