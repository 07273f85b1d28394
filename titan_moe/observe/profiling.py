"""Traces and memory snapshots, one per rank and profiling cycle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from titan_moe.config.job import JobConfig
from titan_moe.errors import ConfigError


@contextmanager
def profiling(config: JobConfig, *, rank: int = 0, resume_step: int = 0) -> Iterator[Callable[[], None]]:
    """Profile the steps of a run as ``config.profiling`` asks.

    Yields a function to call after each step. Every ``profile_freq`` steps the last one is written as
    ``<traces folder>/step_N/rank_R.json`` (a Chrome trace) and, on a GPU, the memory history as
    ``<snapshot folder>/step_N/rank_R.pickle``; after running out of memory, as ``step_N_out_of_memory``.

    Raises:
        ConfigError: when a memory snapshot is asked for without a GPU, or ``profile_freq`` is below 2.
    """
    section, dump_folder = config.profiling, Path(config.job.dump_folder)
    if (section.enable_profiling or section.enable_memory_snapshot) and section.profile_freq < 2:
        raise ConfigError(f"profiling.profile_freq = {section.profile_freq}: must be at least 2 (one step warms up).")
    if section.enable_memory_snapshot and not torch.cuda.is_available():
        raise ConfigError("profiling.enable_memory_snapshot = true needs a CUDA GPU, and there is none. Switch it off.")

    step, recorded = resume_step, False
    profiler = None
    if section.enable_profiling:

        def write_trace(profile: torch.profiler.profile) -> None:
            if not recorded:
                return  # the run ended while the step to record was still running
            path = _file(dump_folder / section.save_traces_folder, f"step_{step}", rank, "json")
            profile.export_chrome_trace(str(path))

        warmup = min(3, section.profile_freq - 1)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=section.profile_freq - 1 - warmup, warmup=warmup, active=1),
            on_trace_ready=write_trace,
            record_shapes=True,
        )
        profiler.start()
    if section.enable_memory_snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)

    def write_snapshot(name: str) -> None:
        path = _file(dump_folder / section.save_memory_snapshot_folder, name, rank, "pickle")
        torch.cuda.memory._dump_snapshot(str(path))

    def step_done() -> None:
        nonlocal step, recorded
        step += 1
        if profiler is not None:
            recorded = True
            profiler.step()
            recorded = False
        if section.enable_memory_snapshot and (step - resume_step) % section.profile_freq == 0:
            write_snapshot(f"step_{step}")

    try:
        yield step_done
    except torch.OutOfMemoryError:
        if section.enable_memory_snapshot:
            write_snapshot(f"step_{step + 1}_out_of_memory")
        raise
    finally:
        if profiler is not None:
            profiler.stop()
        if section.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)


def _file(folder: Path, name: str, rank: int, suffix: str) -> Path:
    path = folder / name / f"rank_{rank}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
