import json

import torch

from titan_moe.config import JobConfig
from titan_moe.observe import Profiler


def job(folder, **changes) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    for key, value in changes.items():
        setattr(config.profiling, key, value)
    return config


def run(config: JobConfig, first: int, last: int, rank: int = 0) -> None:
    with Profiler(config, rank=rank, resume_step=first - 1) as profiler:
        for number in range(first, last + 1):
            with torch.profiler.record_function(f"marked_{number}"):
                torch.ones(4).sum()
            profiler.step()


def test_traces_hold_the_last_step_of_each_cycle(tmp_path):
    run(job(tmp_path, enable_profiling=True, profile_freq=3), 1, 8, rank=2)
    folder = tmp_path / "profile_traces"
    assert sorted(path.name for path in folder.iterdir()) == ["step_3", "step_6"]
    for number in (3, 6):
        events = json.loads((folder / f"step_{number}" / "rank_2.json").read_text())["traceEvents"]
        assert {e["name"] for e in events if e.get("name", "").startswith("marked_")} == {f"marked_{number}"}


def test_a_run_that_ends_at_the_step_to_record_writes_no_empty_trace(tmp_path):
    run(job(tmp_path, enable_profiling=True, profile_freq=2), 1, 3)
    assert [path.name for path in (tmp_path / "profile_traces").iterdir()] == ["step_2"]


def test_a_resumed_run_names_traces_by_the_global_step(tmp_path):
    run(job(tmp_path, enable_profiling=True, profile_freq=2), 11, 12)
    assert (tmp_path / "profile_traces" / "step_12" / "rank_0.json").exists()


def test_nothing_is_written_unless_asked(tmp_path):
    run(job(tmp_path), 1, 20)
    assert not list(tmp_path.iterdir())
