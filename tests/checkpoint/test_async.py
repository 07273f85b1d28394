"""Writing beside the training: what is written is what was there when ``save`` returned, and failures are told."""

import os
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pool
import pytest
import torch
import torch.distributed as dist
from crashing import hold_a_writer, stamp, stamped_step
from small_run import TINY_OPTIONS, parity, write_corpus
from torch import nn
from training import differences, full_state, network, start, train

from titan_moe.checkpoint import Checkpointer, background, snapshot
from titan_moe.config import validate
from titan_moe.distributed import patient_group, set_timeout, timeout_seconds
from titan_moe.errors import CheckpointError
from titan_moe.plugins import chosen
from titan_moe.trainer import Trainer


def value_of(folder, step):
    model = network()
    loaded = Checkpointer(folder, read_only=True).load(model, step=step)
    assert stamped_step(model) == loaded.extra["value"]
    return stamped_step(model)


@pytest.fixture
def gate(monkeypatch):
    """Writes wait until it is set."""
    event = threading.Event()
    original = background.write_checkpoint

    def write(*args):
        assert event.wait(60)
        original(*args)

    monkeypatch.setattr(background, "write_checkpoint", write)
    return event


def test_a_parameter_changed_while_its_checkpoint_is_written_does_not_reach_the_file(tmp_path, gate):
    checkpointer = Checkpointer(tmp_path, async_mode="async")
    model = network()
    stamp(model, 5)
    assert checkpointer.save(1, model, extra={"value": 5}) == tmp_path / "step-1"
    assert checkpointer.writing and not (tmp_path / "step-1").exists()
    stamp(model, 6)
    gate.set()
    checkpointer.wait()
    assert not checkpointer.writing and value_of(tmp_path, 1) == 5
    checkpointer.close()


def test_a_save_waits_for_the_one_before_and_leaks_nothing_into_it(tmp_path, gate):
    checkpointer = Checkpointer(tmp_path, async_mode="async")
    model = network()
    stamp(model, 5)
    checkpointer.save(1, model, extra={"value": 5})
    stamp(model, 6)
    threading.Timer(0.3, gate.set).start()
    checkpointer.save(2, model, extra={"value": 6})
    assert (tmp_path / "step-1").exists()
    stamp(model, 7)
    checkpointer.close()
    assert [value_of(tmp_path, step) for step in (1, 2)] == [5, 6]


def waits_while_writing(corpus, out, ahead):
    """Steps after which training waits for a write that ends only when it is waited for."""
    options = ["--training.steps", "8", "--checkpoint.enable", "--checkpoint.interval", "4"]
    config = parity(corpus, out, *TINY_OPTIONS, *options, "--checkpoint.async_mode", "async")
    config.checkpoint.max_steps_ahead = ahead
    validate(config, 1)
    waited, waits = threading.Event(), []
    write, wait = background.write_checkpoint, Checkpointer.wait

    def held_write(*args):
        assert waited.wait(60)
        write(*args)

    def noted_wait(self):
        if self.writing:
            waits.append(trainer.step_done)
            waited.set()
        wait(self)
        waited.clear()

    with (
        mock.patch.object(background, "write_checkpoint", held_write),
        mock.patch.object(Checkpointer, "wait", noted_wait),
    ):
        trainer = Trainer(config, chosen(config))
        trainer.run()
        trainer.close()
    return waits


@pytest.mark.parametrize("ahead, waits", [(0, [8, 8]), (1, [5, 8]), (3, [7, 8])])
def test_training_waits_when_it_is_too_many_steps_ahead_of_a_write(run_ranks, tmp_path, ahead, waits):
    (tmp_path / "corpus").mkdir()
    corpus = write_corpus(tmp_path / "corpus")
    assert run_ranks(1, waits_while_writing, corpus, tmp_path / "out", ahead) == [waits]


def test_another_process_writes_what_was_there_when_save_returned(tmp_path):
    checkpointer = Checkpointer(tmp_path, 3, async_mode="process")
    model = network()
    for step in range(1, 6):
        stamp(model, step)
        checkpointer.save(step, model, extra={"value": step})
        stamp(model, -1)
    checkpointer.wait()
    assert checkpointer.steps() == [3, 4, 5]
    assert [value_of(tmp_path, step) for step in (3, 4, 5)] == [3, 4, 5]

    shutil.move(tmp_path / "step-5", tmp_path.with_suffix(".kept"))
    folder = tmp_path / "step-5"
    os.chmod(tmp_path, 0o700)
    shutil.rmtree(tmp_path)
    checkpointer.save(6, model, extra={"value": 6})
    with pytest.raises(CheckpointError, match=r"saving step 6 in .* failed: No such file or directory"):
        checkpointer.wait()
    tmp_path.mkdir()
    shutil.move(tmp_path.with_suffix(".kept"), folder)
    stamp(model, 7)
    checkpointer.save(7, model, extra={"value": 7})
    checkpointer.wait()
    assert checkpointer.steps() == [5, 7] and value_of(tmp_path, 7) == 7

    checkpointer._background._writer._process.kill()
    checkpointer.save(8, model)
    with pytest.raises(CheckpointError, match=r"rank 0's process that writes checkpoints ended with exit code -9"):
        checkpointer.wait()
    checkpointer.close()
    assert checkpointer.latest() == 7


def test_the_writing_process_does_not_outlive_a_killed_run(tmp_path):
    ours, theirs = pool.context.Pipe()
    run = pool.context.Process(target=hold_a_writer, args=(str(tmp_path), theirs))
    run.start()
    writer = Path(f"/proc/{ours.recv()}")
    # It is still starting, and would then wait for its peer.
    assert writer.exists()
    run.kill()
    run.join()
    deadline = time.monotonic() + 60
    while writer.exists() and "Z" not in (writer / "stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_failed_write_is_told_once_and_the_next_one_works(tmp_path):
    folder = tmp_path / "c"
    checkpointer = Checkpointer(folder, async_mode="async")
    model = network()
    checkpointer.save(1, model)
    checkpointer.wait()
    folder.rename(tmp_path / "away")
    checkpointer.save(2, model)
    deadline = time.monotonic() + 60
    while not checkpointer.failed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="saving step 2 in"):
        checkpointer.save(3, model)
    assert not checkpointer.failed
    (tmp_path / "away").rename(folder)
    checkpointer.save(3, model)
    checkpointer.close()
    assert checkpointer.steps() == [1, 3]


def save_without_shared_memory(folder):
    """One rank has too little of it for the second checkpoint."""
    model, _ = start()
    checkpointer = Checkpointer(folder, async_mode="process")
    checkpointer.save(1, model)
    checkpointer.wait()
    original = snapshot.shutil.disk_usage
    if dist.get_rank() == 1:
        snapshot.shutil.disk_usage = lambda _: namedtuple("usage", "free")(1000)
    model.big = nn.Parameter(torch.zeros(100_000))
    checkpointer.save(2, model)
    with pytest.raises(
        CheckpointError, match=r"step 2 in .*: a snapshot of \d+ bytes does not fit /dev/shm, which has 1000"
    ):
        checkpointer.wait()
    snapshot.shutil.disk_usage = original
    checkpointer.save(3, model)
    checkpointer.close()
    return checkpointer.steps()


def test_too_little_shared_memory_on_one_rank_is_told_on_all(run_ranks, tmp_path):
    assert run_ranks(2, save_without_shared_memory, str(tmp_path)) == [[1, 3]] * 2


def train_beside(folder, mode):
    """Save after every step while training reduces gradients and more; the states that were saved."""
    model, optimizer = start()
    checkpointer = Checkpointer(folder, 0, async_mode=mode)
    states = {}
    for step in range(1, 6):
        train(model, optimizer, [step])
        states[step] = full_state(model, optimizer)
        checkpointer.save(step, model, optimizer)
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
    checkpointer.close()
    for step, want in states.items():
        fresh, fresh_optimizer = start(seed=9)
        assert checkpointer.load(fresh, fresh_optimizer, step=step).step == step
        assert not differences(full_state(fresh, fresh_optimizer), want), step


@pytest.mark.parametrize("ranks, mode", [(3, "async"), (2, "process")])
def test_saving_beside_a_training_that_reduces_does_not_hang(run_ranks, tmp_path, ranks, mode):
    run_ranks(ranks, train_beside, str(tmp_path), mode)


def fail_on_one_rank(folder):
    model, optimizer = start()
    checkpointer = Checkpointer(folder, async_mode="async")
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    if dist.get_rank() == 1:
        # Only this rank's file cannot be written.
        original = background.write_checkpoint

        def write(save, parts, group):
            return original(save, {name: Unwritable(part) for name, part in parts.items()}, group)

        background.write_checkpoint = write
    checkpointer.save(2, model, optimizer)
    with pytest.raises(CheckpointError, match=r"saving step 2 in .*rank 1: .*no more"):
        checkpointer.wait()
    if dist.get_rank() == 1:
        background.write_checkpoint = original
    checkpointer.save(3, model, optimizer)
    checkpointer.close()
    return checkpointer.steps()


class Unwritable:
    def __init__(self, part):
        self.offsets, self.shape, self.counts = part.offsets, part.shape, part.counts
        self._local, self._asked = part.local, 0

    @property
    def local(self):
        # The plan asks once; writing asks again.
        self._asked += 1
        if self._asked > 1:
            raise OSError("no more")
        return self._local


def test_a_write_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(run_ranks, tmp_path):
    assert run_ranks(3, fail_on_one_rank, str(tmp_path)) == [[1, 3]] * 3


def group_timeouts():
    group = patient_group(77)
    set_timeout(5)
    return timeout_seconds(), timeout_seconds(group)


def test_fault_31_the_writers_group_keeps_its_own_timeout(run_ranks):
    assert run_ranks(2, group_timeouts) == [(5.0, 77.0)] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights and take them back")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_folder_that_may_no_longer_be_written_keeps_the_last_checkpoint(tmp_path, mode):
    checkpointer = Checkpointer(tmp_path, async_mode=mode)
    model = network()
    stamp(model, 1)
    checkpointer.save(1, model, extra={"value": 1})
    checkpointer.wait()
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"saving step 2 in .* failed: Permission denied"):
            checkpointer.save(2, model)
            checkpointer.wait()
    finally:
        os.seteuid(0)
    assert checkpointer.steps() == [1] and value_of(tmp_path, 1) == 1
    checkpointer.close()
