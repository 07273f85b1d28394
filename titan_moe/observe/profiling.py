"""Traces and memory snapshots, one per rank and profiling cycle."""

from pathlib import Path
from typing import Self

import torch

from titan_moe.config import JobConfig


class Profiler:
    """Profiles the steps of a run as ``config.profiling`` asks: a context manager, with ``step()`` after each step.

    Every ``profile_freq`` steps the last one is written as ``<traces folder>/step_N/rank_R.json`` (a Chrome trace)
    and, on a GPU, the memory history as ``<snapshot folder>/step_N/rank_R.pickle``; after running out of memory, as
    ``step_N_out_of_memory``.

    Args:
        config: the run's configuration, validated; job and profiling are read.
        rank: this process.
        resume_step: steps already done.
    """

    def __init__(self, config: JobConfig, *, rank: int = 0, resume_step: int = 0):
        self.section = section = config.profiling
        self.folder, self.rank = Path(config.job.dump_folder), rank
        self.first_step = self.step_done = resume_step
        self.recorded = False
        self.profile = self._torch_profiler() if section.enable_profiling else None

    def step(self) -> None:
        """Tell that a step is done."""
        self.step_done += 1
        if self.profile is not None:
            self.recorded = True
            self.profile.step()
            self.recorded = False
        if self.section.enable_memory_snapshot and (self.step_done - self.first_step) % self.section.profile_freq == 0:
            self._write_snapshot(f"step_{self.step_done}")

    def __enter__(self) -> Self:
        if self.profile is not None:
            self.profile.start()
        if self.section.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.profile is not None:
            self.profile.stop()
        if self.section.enable_memory_snapshot:
            if kind is not None and issubclass(kind, torch.OutOfMemoryError):
                self._write_snapshot(f"step_{self.step_done + 1}_out_of_memory")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _torch_profiler(self) -> torch.profiler.profile:
        freq = self.section.profile_freq
        warmup = min(3, freq - 1)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=freq - 1 - warmup, warmup=warmup, active=1),
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )

    def _write_trace(self, profile: torch.profiler.profile) -> None:
        # Also called when the run ends before the step to record is done: then there is nothing to keep.
        if self.recorded:
            path = self._file(self.section.save_traces_folder, f"step_{self.step_done}", "json")
            profile.export_chrome_trace(str(path))

    def _write_snapshot(self, name: str) -> None:
        path = self._file(self.section.save_memory_snapshot_folder, name, "pickle")
        torch.cuda.memory._dump_snapshot(str(path))

    def _file(self, section: str, name: str, suffix: str) -> Path:
        path = self.folder / section / name / f"rank_{self.rank}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
