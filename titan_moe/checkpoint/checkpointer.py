"""Save and load: which folder, in which order, agreed between all ranks."""

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.checkpoint import files, state
from titan_moe.checkpoint.agree import on_rank_0
from titan_moe.checkpoint.background import Background
from titan_moe.checkpoint.parts import parts_of_rank
from titan_moe.checkpoint.target import Loaded, Target
from titan_moe.checkpoint.write import Save, write_checkpoint
from titan_moe.distributed import patient_group, rank, world_size
from titan_moe.errors import CheckpointError

logger = logging.getLogger(__name__)

AsyncMode = Literal["disabled", "async", "process"]


class Checkpointer:
    """The checkpoints ``step-N`` of one run in one folder. All ranks call every method, with the same arguments.

    A checkpoint is written aside, flushed, and renamed when complete; its manifest holds a checksum of every file.
    Whatever fails on one rank raises on all, and the checkpoints that were complete before stay.

    Args:
        folder: where the ``step-N`` folders live.
        keep_latest_k: complete checkpoints to keep; 0 keeps all.
        read_only: only load; do not create the folder or remove leftovers of runs that were killed.
        async_mode: ``disabled``: ``save`` returns when the checkpoint is complete. ``async`` and ``process``: it
            returns once all is copied to host memory, and a thread or another process writes the copy.
        timeout_seconds: how long a rank waits for the slowest one to write its part.

    Raises:
        CheckpointError: when the folder cannot be created or read.
    """

    def __init__(
        self,
        folder: str | Path,
        keep_latest_k: int = 10,
        *,
        read_only: bool = False,
        async_mode: AsyncMode = "disabled",
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.folder = Path(folder)
        self._keep = keep_latest_k
        self._read_only = read_only
        self._timeout = timeout_seconds
        self._group: dist.ProcessGroup | None = None
        self._background: Background | None = None
        if not read_only:
            on_rank_0(f"checkpoint folder {self.folder} cannot be used", self._prepare)
            if async_mode != "disabled":
                self._background = Background(timeout_seconds, in_process=async_mode == "process")

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

        With an ``async_mode`` it first waits until the checkpoint before is written. What happens to the one that it
        begins, ``wait`` tells.

        Args:
            step: optimizer steps done.
            model: parameters and persistent buffers are saved by name, DTensors by their shards.
            optimizer: its tensors are saved by parameter name; hyper-parameters are not.
            extra: JSON-able values that are the same on every rank (rank 0's are written).
            rank_tensors: this rank's own tensors, such as ``rng_tensors()``.

        Returns:
            the checkpoint's folder.

        Raises:
            CheckpointError: on every rank, naming what could not be written; with an ``async_mode`` also when that
                was the checkpoint before, and then this one is not begun.
        """
        assert not self._read_only, "a read-only Checkpointer cannot save"
        self.wait()
        tensors = state.model_tensors(model)
        without_state = []
        if optimizer is not None:
            tensors |= state.optimizer_tensors(model, optimizer)
            without_state = state.without_optimizer_state(model, optimizer)
        tensors |= {state.rank_key(rank(), name): value for name, value in (rank_tensors or {}).items()}
        about = {
            "step": step,
            "world_size": world_size(),
            "has_optimizer": optimizer is not None,
            "extra": extra or {},
        }
        save, parts = Save(self.folder, step, self._keep, about, without_state), {}
        try:
            parts = parts_of_rank(tensors)
        except CheckpointError as error:
            save = replace(save, fault=str(error))
        if self._background is not None:
            self._background.start(save, parts)
        else:
            self._group = self._group or patient_group(self._timeout)
            write_checkpoint(save, parts, self._group)
        return self.folder / f"step-{step}"

    @property
    def writing(self) -> bool:
        """Whether this rank still writes a checkpoint in the background."""
        return self._background is not None and self._background.writing

    @property
    def failed(self) -> bool:
        """Whether this rank's write in the background has failed, and ``wait`` has not said so yet.

        Ranks learn of it at different moments: agree before calling ``wait``.
        """
        return self._background is not None and self._background.failed

    def wait(self) -> None:
        """Until the checkpoint that ``save`` began is complete.

        Raises:
            CheckpointError: on every rank, what could not be written; said once.
        """
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait for the last checkpoint and let go of the writer. Raises as ``wait`` does."""
        if self._background is not None:
            background, self._background = self._background, None
            background.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, the one written last at the end. Contents are checked by ``load``."""
        return on_rank_0(
            f"reading {self.folder} failed",
            lambda: [manifest.step for manifest, _ in files.complete_checkpoints(self.folder)[0]],
        )

    def latest(self) -> int | None:
        """Step of the complete checkpoint that was written last."""
        steps = self.steps()
        return steps[-1] if steps else None

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int = -1,
        *,
        exclude: Collection[str] = (),
    ) -> Loaded | None:
        """Load into ``model`` and ``optimizer`` in place, whatever number of processes saved it.

        Every name, shape and dtype must fit before the first value is read, and nothing of the model changes before
        every checksum fits. Damaged checkpoints are named in the log and passed over in favour of the newest complete
        one, unless ``step`` asks for one of them. Each rank reads what it needs once; on the way it verifies the files
        that it wrote, if the layout is still the same.

        Args:
            step: the step to load; -1: the newest complete one.
            exclude: shell patterns of names of model tensors to leave as they are, with what the optimizer has of
                them. Neither they nor the checkpoint's need to fit.

        Returns:
            None when ``step`` is -1 and there is no checkpoint at all.

        Raises:
            CheckpointError: on every rank, for a step that is not there, a damaged checkpoint when there is no
                complete one or ``step`` asked for it, one that does not fit, and a pattern that matches nothing.
        """
        candidates, faults = on_rank_0(f"reading {self.folder} failed", lambda: self._candidates(step))
        target = Target(model, optimizer, exclude)
        for manifest, folder in reversed(candidates):
            damaged = target.read(folder, manifest)
            if not damaged:
                self._report(faults, f"loading {folder} instead")
                return target.commit(folder, manifest)
            faults.append(f"{damaged} damaged: the checksum does not fit")
        if faults:
            raise CheckpointError(
                f"no complete checkpoint to load in {self.folder}: {'; '.join(faults)}; remove them to start anew, "
                "or choose another with checkpoint.load_step"
            )
        return None

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.clean(self.folder)
        files.new_folder(self.folder, 0).rmdir()  # writable?

    def _candidates(self, step: int) -> tuple[list[tuple[files.Manifest, Path]], list[str]]:
        if step < 0:
            return files.complete_checkpoints(self.folder)
        folders = files.step_folders(self.folder)
        if step not in folders:
            known = ", ".join(map(str, sorted(folders))) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step}; steps there are: {known}")
        return [(files.read_manifest(folders[step]), folders[step])], []

    def _report(self, faults: list[str], then: str) -> None:
        if rank() == 0:
            for fault in faults:
                logger.warning("%s; %s", fault, then)
