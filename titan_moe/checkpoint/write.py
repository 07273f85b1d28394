"""Writing one checkpoint: aside, flushed, with a checksum of every file, then renamed."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_moe.checkpoint import files
from titan_moe.checkpoint.agree import on_all_ranks, on_rank_0
from titan_moe.checkpoint.parts import Part
from titan_moe.checkpoint.tensors import write_tensors
from titan_moe.distributed import gather_objects, rank
from titan_moe.errors import CheckpointError


@dataclass(frozen=True)
class Save:
    """A checkpoint to write, apart from its tensors.

    Attributes:
        folder: where the ``step-N`` folders live.
        step: optimizer steps done.
        keep: complete checkpoints to leave; 0: all.
        about: what ``state.json`` says, the same on every rank.
        without_state: parameters of this rank that the optimizer has no state for.
        fault: why this rank cannot take part, which makes the save fail on every rank.
    """

    folder: Path
    step: int
    keep: int
    about: dict[str, Any]
    without_state: list[str]
    fault: str | None = None


def write_checkpoint(save: Save, parts: dict[str, Part], group: dist.ProcessGroup | None = None) -> None:
    """Write ``step-N`` and remove what is too old; every rank calls it.

    Args:
        save: what to write.
        parts: what this rank holds of the tensors, by name.
        group: of all ranks, to communicate over; None: the world's own.

    Raises:
        CheckpointError: on every rank, naming what could not be written; older checkpoints are as they were.
    """
    action = f"saving step {save.step} in {save.folder} failed"
    on_all_ranks(action, lambda: _check(save), group)
    temporary = on_rank_0(action, lambda: files.new_folder(save.folder, save.step), group)
    try:
        try:
            own = write_tensors(temporary, parts, group)
        except CheckpointError as error:
            raise CheckpointError(f"{action}: {error}") from error
        gathered = gather_objects((own, save.without_state), group)
        entries = {name: entry for written, _ in gathered for name, entry in written.items()}
        without = sorted({name for _, names in gathered for name in names})
        on_rank_0(action, lambda: _publish(save, temporary, entries, without), group)
    except BaseException:
        if rank() == 0:
            # What cannot be removed now is removed at the next start.
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    on_rank_0(f"removing old checkpoints from {save.folder} failed", lambda: _prune(save), group)


def _check(save: Save) -> None:
    if save.fault is not None:
        raise CheckpointError(save.fault)


def _publish(save: Save, temporary: Path, entries: dict[str, tuple[int, int]], without: list[str]) -> None:
    files.write_json(temporary / files.STATE, {**save.about, "without_optimizer_state": without})
    entries = {**entries, files.STATE: files.checksum(temporary / files.STATE)}
    complete, _ = files.complete_checkpoints(save.folder)
    serial = 1 + max((manifest.serial for manifest, _ in complete), default=0)
    files.write_manifest(temporary, files.Manifest(save.step, serial, entries))
    files.publish(temporary, save.folder / f"step-{save.step}")


def _prune(save: Save) -> None:
    if save.keep > 0:
        for _, folder in files.complete_checkpoints(save.folder)[0][: -save.keep]:
            files.remove(folder)
