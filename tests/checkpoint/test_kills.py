"""Runs killed at any moment: each restart goes on from the newest complete checkpoint, with the very same numbers."""

import random
import signal
import time

import pool
import pytest
from small_run import TINY_OPTIONS, parity, records, train_until_killed, write_corpus

from titan_moe.checkpoint import Checkpointer

WORLD, INTERVAL = 2, 3
OPTIONS = [
    *TINY_OPTIONS,
    *("--parallelism.expert_parallel_degree", "2", "--training.steps", "100000", "--training.seq_len", "16"),
    *("--training.global_batch_size", "4"),
]


def launch(config, folder, name):
    store, note = str(folder / f"{name}.store"), str(folder / f"{name}.note")
    processes = [
        pool.context.Process(target=train_until_killed, args=(config, WORLD, rank, store, note))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    return processes, folder / f"{name}.note"


def end(processes):
    for process in processes:
        process.join(20)
        process.kill()
        process.join()


def wait_until(condition, processes):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and all(process.is_alive() for process in processes)
        time.sleep(0.005)


def steps_logged(out):
    return len(records(out)) if (out / "metrics.jsonl").exists() else 0


def steps_saved(folder):
    return [int(path.name.split("-")[1]) for path in folder.glob("step-*") if not path.suffix]


def kill_runs(tmp_path, mode, kills, ahead=0):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_corpus(corpus)
    out, chance, newest = tmp_path / "out", random.Random(f"{mode}{ahead}"), 0
    checkpoint = ["--checkpoint.enable", "--checkpoint.interval", str(INTERVAL), "--checkpoint.keep_latest_k", "2"]
    config = parity(corpus, out, *OPTIONS, *checkpoint, "--checkpoint.async_mode", mode)
    config.checkpoint.max_steps_ahead = ahead
    # What can be lost since the newest checkpoint: an interval, and the steps beside the next one's write.
    limit = INTERVAL if mode == "disabled" else INTERVAL + (ahead or INTERVAL)
    folder = out / "checkpoint"
    for attempt in range(kills):
        processes, note = launch(config, tmp_path, str(attempt))
        wait_until(lambda note=note: note.exists() and note.read_text(), processes)
        assert int(note.read_text()) == newest
        # Some time after the first new step, or after the first new checkpoint.
        if attempt % 4 < 2:
            wait_until(lambda start=newest: max(steps_saved(folder), default=0) > start, processes)
        else:
            wait_until(lambda start=newest: steps_logged(out) > start, processes)
        time.sleep(chance.uniform(0, 0.3))
        victim = processes[attempt % WORLD]
        victim.kill()
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        end(processes)
        before, newest = newest, Checkpointer(folder, read_only=True).latest() or 0
        assert newest >= before
        assert steps_logged(out) - newest <= limit
    assert newest >= kills // 4 * INTERVAL

    # One more, so that all that was resumed is on record, then a run that nothing disturbs.
    processes, _ = launch(config, tmp_path, "last")
    wait_until(lambda: steps_logged(out) > newest + 1, processes)
    for process in processes:
        process.kill()
    end(processes)
    got = records(out)
    processes, _ = launch(parity(corpus, tmp_path / "whole", *OPTIONS), tmp_path, "whole")
    wait_until(lambda: steps_logged(tmp_path / "whole") >= len(got), processes)
    for process in processes:
        process.kill()
    end(processes)
    assert [record["step"] for record in got] == list(range(1, len(got) + 1))
    assert got == records(tmp_path / "whole")[: len(got)]


def test_a_killed_run_goes_on_from_its_newest_checkpoint(tmp_path):
    kill_runs(tmp_path, "async", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, kills, ahead",
    [("disabled", 20, 0), ("async", 14, 0), ("async", 14, 1), ("process", 6, 0), ("process", 6, 1)],
)
def test_sixty_killed_runs_go_on_bit_for_bit(tmp_path, mode, kills, ahead):
    kill_runs(tmp_path, mode, kills, ahead)
