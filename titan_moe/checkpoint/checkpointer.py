"""Save and load: which folder, in which order, agreed between all ranks."""

import logging
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_moe.checkpoint import files, state
from titan_moe.checkpoint.agree import on_all_ranks, on_rank_0
from titan_moe.checkpoint.tensors import own_files, read_index, read_tensors, write_tensors
from titan_moe.distributed import gather_objects, rank, world_size
from titan_moe.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What ``Checkpointer.load`` found besides the model's and the optimizer's tensors.

    ``rank_tensors`` is empty when the checkpoint was saved by another number of processes.
    """

    step: int
    extra: dict[str, Any]
    rank_tensors: dict[str, torch.Tensor]
    folder: Path


class Checkpointer:
    """The checkpoints ``step-N`` of one run in one folder. All ranks call every method, with the same arguments.

    A checkpoint is written aside, flushed, and renamed when complete; its manifest holds a checksum of every file.
    Whatever fails on one rank raises on all, and the checkpoints that were complete before stay.

    Args:
        folder: where the ``step-N`` folders live.
        keep_latest_k: complete checkpoints to keep; 0 keeps all.
        read_only: only load; do not create the folder or remove leftovers of runs that were killed.

    Raises:
        CheckpointError: when the folder cannot be created or read.
    """

    def __init__(self, folder: str | Path, keep_latest_k: int = 10, *, read_only: bool = False) -> None:
        self.folder = Path(folder)
        self._keep = keep_latest_k
        self._read_only = read_only
        if not read_only:
            on_rank_0(f"checkpoint folder {self.folder} cannot be used", self._prepare)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: dict[str, Any] | None = None,
        rank_tensors: dict[str, torch.Tensor] | None = None,
    ) -> Path:
        """Write ``step-N``; a checkpoint of that step is replaced once the new one is complete.

        Args:
            step: optimizer steps done.
            model: parameters and persistent buffers are saved by name, DTensors by their shards.
            optimizer: its tensors are saved by parameter name; hyper-parameters are not.
            extra: JSON-able values that are the same on every rank (rank 0's are written).
            rank_tensors: this rank's own tensors, such as ``rng_tensors()``.

        Returns:
            the checkpoint's folder.

        Raises:
            CheckpointError: on every rank, naming what could not be written.
        """
        assert not self._read_only, "a read-only Checkpointer cannot save"
        tensors = state.model_tensors(model)
        without = []
        if optimizer is not None:
            tensors |= state.optimizer_tensors(model, optimizer)
            lacking = gather_objects(state.without_optimizer_state(model, optimizer))
            without = sorted({name for names in lacking for name in names})
        tensors |= {state.rank_key(rank(), name): value for name, value in (rank_tensors or {}).items()}
        about = {
            "step": step,
            "world_size": world_size(),
            "has_optimizer": optimizer is not None,
            "without_optimizer_state": without,
            "extra": extra or {},
        }
        action = f"saving step {step} in {self.folder} failed"
        temporary = on_rank_0(action, lambda: files.new_folder(self.folder, step))
        try:
            write_tensors(temporary, tensors)
            parts = on_all_ranks(action, lambda: {path.name: files.checksum(path) for path in own_files(temporary)})
            entries = {name: entry for part in parts for name, entry in part.items()}
            on_rank_0(action, lambda: self._publish(temporary, step, about, entries))
        except BaseException:
            if rank() == 0:
                # What cannot be removed now is removed at the next start.
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        on_rank_0(f"removing old checkpoints from {self.folder} failed", self._prune)
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, the one written last at the end. Contents are checked by ``load``."""
        return on_rank_0(
            f"reading {self.folder} failed", lambda: [manifest.step for manifest, _ in self._complete()[0]]
        )

    def latest(self) -> int | None:
        """Step of the complete checkpoint that was written last."""
        steps = self.steps()
        return steps[-1] if steps else None

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int = -1) -> Loaded | None:
        """Load into ``model`` and ``optimizer`` in place, whatever number of processes saved it.

        Every name, shape and dtype must fit before the first value is read. Damaged checkpoints are named in the
        log and passed over in favour of the newest complete one, unless ``step`` asks for one of them.

        Args:
            step: the step to load; -1: the newest complete one.

        Returns:
            None when ``step`` is -1 and there is no checkpoint at all.

        Raises:
            CheckpointError: on every rank, for a step that is not there, a damaged checkpoint when there is no
                complete one or ``step`` asked for it, and a checkpoint that does not fit.
        """
        folder, manifest = self._choose(step)
        if folder is None:
            return None
        sizes = {name: size for name, (size, _) in manifest.files.items()}
        action = f"loading {folder} failed"
        prepared = None
        elsewhere = {name for names in gather_objects(list(state.model_tensors(model))) for name in names}

        def prepare() -> None:
            nonlocal prepared
            about = _read_about(folder)
            prepared = about, *_prepare_targets(model, optimizer, read_index(folder, sizes), about, elsewhere)

        on_all_ranks(action, prepare)
        about, targets, optimizer_state, rank_tensors = prepared
        read_tensors(folder, sizes, targets)
        pairs = state.copies(model)
        with torch.no_grad():
            for first, other in pairs:
                other.copy_(first)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(optimizer_state)
            for first, other in pairs:
                if first in optimizer_state:
                    optimizer.state[other] = {key: value.clone() for key, value in optimizer_state[first].items()}
        return Loaded(manifest.step, about["extra"], rank_tensors, folder)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.clean(self.folder)
        files.new_folder(self.folder, 0).rmdir()  # writable?

    def _complete(self) -> tuple[list[tuple[files.Manifest, Path]], list[str]]:
        """Complete checkpoints in the order they were written, and what is wrong with each of the others."""
        complete, faults = [], []
        for _, folder in sorted(files.step_folders(self.folder).items()):
            try:
                complete.append((files.read_manifest(folder), folder))
            except CheckpointError as error:
                faults.append(str(error))
        return sorted(complete, key=lambda pair: (pair[0].serial, pair[0].step)), faults

    def _publish(self, temporary: Path, step: int, about: dict[str, Any], entries: dict[str, tuple[int, int]]) -> None:
        files.write_json(temporary / files.STATE, about)
        entries[files.STATE] = files.checksum(temporary / files.STATE)
        complete, _ = self._complete()
        serial = 1 + max((manifest.serial for manifest, _ in complete), default=0)
        files.write_manifest(temporary, files.Manifest(step, serial, entries))
        files.publish(temporary, self.folder / f"step-{step}")

    def _prune(self) -> None:
        if self._keep > 0:
            for _, folder in self._complete()[0][: -self._keep]:
                files.remove(folder)

    def _choose(self, step: int) -> tuple[Path | None, files.Manifest | None]:
        """The checkpoint to load, its checksums verified with the work split over the ranks."""
        candidates, faults = on_rank_0(f"reading {self.folder} failed", lambda: self._candidates(step))
        for manifest, folder in reversed(candidates):
            verify = partial(files.damaged_files, folder, manifest, rank(), world_size())
            damaged = [path for part in on_all_ranks(f"reading {folder} failed", verify) for path in part]
            if not damaged:
                self._report(faults, f"loading {folder} instead")
                return folder, manifest
            faults.append(f"{', '.join(damaged)} damaged: the checksum does not fit")
        if faults:
            raise CheckpointError(
                f"no complete checkpoint to load in {self.folder}: {'; '.join(faults)}; remove them to start anew, "
                "or choose another with checkpoint.load_step"
            )
        return None, None

    def _candidates(self, step: int) -> tuple[list[tuple[files.Manifest, Path]], list[str]]:
        if step < 0:
            return self._complete()
        folders = files.step_folders(self.folder)
        if step not in folders:
            known = ", ".join(map(str, sorted(folders))) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step}; steps there are: {known}")
        return [(files.read_manifest(folders[step]), folders[step])], []

    def _report(self, faults: list[str], then: str) -> None:
        if rank() == 0:
            for fault in faults:
                logger.warning("%s; %s", fault, then)


def _read_about(folder: Path) -> dict[str, Any]:
    about = files.read_json(folder / files.STATE)
    keys = {"step", "world_size", "has_optimizer", "without_optimizer_state", "extra"}
    if not isinstance(about, dict) or not keys <= about.keys():
        raise CheckpointError(f"{folder / files.STATE} is not a checkpoint's state")
    return about


def _prepare_targets(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    saved: dict[str, Any],
    about: dict[str, Any],
    elsewhere: set[str],
) -> tuple[dict[str, torch.Tensor], dict[nn.Parameter, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Tensors to fill by name, the optimizer's new state and this rank's own tensors, all checked to fit."""
    targets = state.model_tensors(model)
    ignored: tuple[str, ...] = ("rank.",)
    optimizer_state: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    if optimizer is None:
        ignored = ("rank.", "optim.")
    elif not about["has_optimizer"]:
        raise CheckpointError("it holds no optimizer state: it was saved without an optimizer")
    else:
        optimizer_state = state.new_optimizer_state(model, optimizer, saved)
        targets |= state.named_state(model, optimizer_state)
        lacking = state.without_optimizer_state(model, optimizer, optimizer_state)
        absent = set(lacking) - set(about["without_optimizer_state"])
        if absent:
            raise CheckpointError(f"it lacks the optimizer state of {', '.join(sorted(absent)[:8])}")
    state.check_fit(targets, saved, ignored, elsewhere)
    own: dict[str, torch.Tensor] = {}
    if about["world_size"] == world_size():
        prefix = state.rank_key(rank(), "")
        for name, entry in saved.items():
            if name.startswith(prefix):
                own[name.removeprefix(prefix)] = torch.empty(entry.size, dtype=entry.properties.dtype)
        targets |= {prefix + name: value for name, value in own.items()}
    return targets, optimizer_state, own
