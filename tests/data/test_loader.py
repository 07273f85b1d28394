"""The order of samples over layouts, resumes and workers; validation; and settings that cannot work."""

import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from titan_moe.config.job import JobConfig
from titan_moe.data import build_loader, build_tokenizer
from titan_moe.errors import ConfigError, DataError

SEQ_LEN = 16
TOKENIZER = build_tokenizer("bytes")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Thirty documents in which every sequence is unlike any other."""
    root = tmp_path_factory.mktemp("text")
    for index in range(30):
        (root / f"{index}.txt").write_text(" ".join(str(1000 * index + at) for at in range(10 + 3 * index)))
    return root


@pytest.fixture
def config(text, tmp_path):
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    config.training.dataset, config.training.dataset_path = "text", str(text)
    config.training.seq_len, config.training.local_batch_size = SEQ_LEN, 2
    config.training.num_workers, config.training.seed = 0, 11
    return config


def rows(batch):
    return [tuple(row) for row in torch.cat([batch["input_ids"], batch["labels"], batch["document_ids"]], 1).tolist()]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def reference(config, count):
    """The samples in global order, straight from the dataset."""
    dataset = build_loader(config, TOKENIZER, dp_rank=0, dp_size=1).dataset
    batch = dataset.__getitems__(list(range(count)))
    return rows({name: torch.from_numpy(array) for name, array in batch.items()})


def run_steps(config, dp_size, steps, state=None):
    """The samples of each global step, ranks in order within a micro-step, and every rank's state."""
    loaders = [build_loader(config, TOKENIZER, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        iter(loader)
    taken = []
    for _ in range(steps):
        step = []
        for _ in range(loaders[0].accumulation_steps):
            for loader in loaders:
                step += rows(next(loader))
        taken.append(step)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    assert all(one == states[0] for one in states)
    return taken, states[0]


@pytest.mark.parametrize(("dp_size", "local"), [(1, 8), (1, 2), (1, 1), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)])
def test_samples_of_a_step_are_the_same_for_any_process_count_and_accumulation(config, dp_size, local):
    config.training.local_batch_size, config.training.global_batch_size = local, 8
    taken, state = run_steps(config, dp_size, steps=5)
    expected = reference(config, 40)
    assert taken == [expected[8 * step : 8 * step + 8] for step in range(5)]
    assert state == {"samples_seen": 40}


def test_without_a_global_batch_size_a_step_is_one_batch_per_process(config):
    taken, state = run_steps(config, dp_size=3, steps=2)
    assert flat(taken) == reference(config, 12) and state == {"samples_seen": 12}


def test_fault_30_resume_mid_epoch_mid_pack_and_across_epochs_sees_each_sample_once(config):
    config.training.global_batch_size = 8
    per_epoch = build_loader(config, TOKENIZER, dp_rank=0, dp_size=1).sequences_per_epoch
    total = 2 * per_epoch + 16
    expected, taken, state = reference(config, total + 100), [], {"samples_seen": 0}
    # Other process counts, local and global batch sizes in turn; steps straddle the epochs' ends.
    layouts = itertools.cycle([(1, 2, 8), (2, 1, 8), (4, 2, 8), (2, 3, 6), (1, 5, 10), (2, 2, 12)])
    while state["samples_seen"] < total:
        dp_size, config.training.local_batch_size, config.training.global_batch_size = next(layouts)
        steps, state = run_steps(config, dp_size, 3, state)
        taken += flat(steps)
    assert state["samples_seen"] == len(taken) > total > 2 * per_epoch
    assert taken == expected[: len(taken)]
    # The text is unlike itself everywhere, so one epoch's samples are all different and two epochs repeat them.
    assert len(set(taken[:per_epoch])) == per_epoch


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_change_nothing_and_reading_ahead_is_not_seen(config, workers):
    config.training.global_batch_size = 4
    expected = run_steps(config, 1, 6)
    config.training.num_workers = workers
    assert run_steps(config, 1, 6) == expected
    assert run_steps(config, 1, 3, {"samples_seen": 12}) == (expected[0][3:], {"samples_seen": 24})


def test_a_step_cut_short_is_handed_out_again(config):
    config.training.global_batch_size = 6
    loader = build_loader(config, TOKENIZER, dp_rank=0, dp_size=1, start_sample=12)
    expected = reference(config, 30)
    first = [rows(next(loader)) for _ in range(5)]  # one step of three batches, and two more
    assert flat(first) == expected[12:22] and loader.state_dict() == {"samples_seen": 18}
    assert rows(next(iter(loader))) == expected[18:20]


def test_batch_is_int64_and_starting_draws_nothing_from_the_global_generator(config):
    config.training.num_workers = 1
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)
    batch = next(iter(loader))
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)
    assert set(batch) == {"input_ids", "labels", "document_ids"}
    assert all(t.dtype == torch.int64 and t.shape == (2, SEQ_LEN) for t in batch.values())


def test_counts_and_seeds(config, text):
    loader = build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)
    size = sum(len(file.read_bytes()) for file in text.iterdir())
    assert (loader.num_documents, loader.num_bytes, loader.num_tokens) == (30, size, size + 30)
    assert loader.sequences_per_epoch == (size + 29) // SEQ_LEN and loader.bad_records == 0
    with pytest.raises(TypeError, match="never ends"):
        len(loader)
    first = reference(config, 4)
    config.training.seed = 12
    assert reference(config, 4) != first
    config.debug.seed = 11  # torchtitan's name beats training.seed
    assert reference(config, 4) == first


def validation_rows(config, dp_size, local, steps=-1):
    config.validation.enable, config.validation.fraction, config.validation.steps = True, 0.2, steps
    config.training.local_batch_size = local
    loaders = [
        build_loader(config, TOKENIZER, dp_rank=rank, dp_size=dp_size, split="validation") for rank in range(dp_size)
    ]
    batches = [list(loader) for loader in loaders]
    assert {len(one) for one in batches} == {len(loaders[0])}
    assert [list(map(rows, one)) for one in batches] == [list(map(rows, loader)) for loader in loaders]
    return [row for step in zip(*batches, strict=True) for batch in step for row in rows(batch)], loaders[0]


@pytest.mark.parametrize(("dp_size", "local"), [(1, 1), (1, 7), (2, 3), (4, 5)])
def test_validation_gives_each_sample_once_and_ranks_the_same_number_of_batches(config, dp_size, local):
    taken, loader = validation_rows(config, dp_size, local)
    padding = [row for row in taken if row[SEQ_LEN : 2 * SEQ_LEN] == (-100,) * SEQ_LEN]
    real = [row for row in taken if row not in padding]
    assert len(set(real)) == len(real) == loader.sequences_per_epoch
    assert len(padding) == -len(real) % (dp_size * local)
    assert real == validation_rows(config, 1, 1)[0]


def test_validation_steps_and_seed(config):
    everything, _ = validation_rows(config, 1, 2)
    assert validation_rows(config, 2, 2, steps=3)[0] == everything[:12]
    config.training.seed = 99
    assert validation_rows(config, 1, 2)[0] == everything
    assert len(validation_rows(config, 1, 2, steps=10**6)[1]) == -(-len(everything) // 2)


def test_splits_are_disjoint_and_together_are_everything(config, text):
    config.validation.enable, config.validation.fraction = True, 0.2
    train, held_out = (
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=1, split=split).dataset.corpus
        for split in ("train", "validation")
    )
    documents = [
        bytes(corpus.tokens[a : b - 1].astype("uint8"))
        for corpus in (train, held_out)
        for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)
    ]
    assert sorted(documents) == sorted(file.read_bytes() for file in text.iterdir())
    assert held_out.num_documents > 0 and train.num_documents > 0


def test_a_validation_dataset_of_its_own_is_used_whole(config, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"text": "something else entirely"}\n')
    config.validation.enable = True
    config.validation.dataset, config.validation.dataset_path = "jsonl", str(tmp_path / "held_out.jsonl")
    assert build_loader(config, TOKENIZER, dp_rank=0, dp_size=1, split="validation").num_documents == 1
    assert build_loader(config, TOKENIZER, dp_rank=0, dp_size=1).num_documents == 30


def test_naming_the_training_data_for_validation_still_holds_documents_out(config, text):
    config.validation.enable, config.validation.fraction = True, 0.2
    counts = [build_loader(config, TOKENIZER, dp_rank=0, dp_size=1).num_documents]
    config.validation.dataset, config.validation.dataset_path = "text", f"{text}/../{text.name}"
    counts.append(build_loader(config, TOKENIZER, dp_rank=0, dp_size=1).num_documents)
    assert counts[0] == counts[1] < 30


def test_bad_records_stop_the_run_or_are_reported_once(config, tmp_path, caplog):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "' + "long enough " * 9 + '"}\n{"txt": ""}\n')
    config.training.dataset, config.training.dataset_path = "jsonl", str(file)
    with pytest.raises(DataError, match=r"data\.jsonl:2: no field 'text'"):
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)
    config.training.skip_bad_records = True
    with caplog.at_level(logging.INFO):
        loaders = [build_loader(config, TOKENIZER, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert [loader.bad_records for loader in loaders] == [1, 1]
    assert caplog.text.count("Skipped 1 bad records") == 1


def test_data_that_cannot_be_used(config, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    config.training.dataset_path = str(tmp_path / "empty.txt")
    with pytest.raises(DataError, match=r"empty\.txt' \(text\) holds no text: check training\.dataset_path"):
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)
    (tmp_path / "tiny.txt").write_text("short")
    config.training.dataset_path = str(tmp_path / "tiny.txt")
    with pytest.raises(DataError, match="has 6 tokens in 1 documents, fewer than the 17"):
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)
    config.validation.enable = True
    with pytest.raises(DataError, match=r"Of 1 documents .* none falls in the validation split .*fraction = 0\.05"):
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=1, split="validation")
    config.validation.fraction = 1 - 1e-9
    with pytest.raises(DataError, match=r"Of 1 documents .* none falls in the train split"):
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("training", "local_batch_size", 0, "local_batch_size = 0: must be at least 1"),
        ("training", "global_batch_size", 7, "= 7 is not a multiple of .* = 4. Nearest legal: 4 or 8"),
        ("training", "dataset", "txt", "Did you mean 'text'"),
        ("training", "dataset_path", None, "needs training.dataset_path"),
        ("validation", "dataset", "stdlb", "validation.dataset = 'stdlb' .* Did you mean 'stdlib'"),
    ],
)
def test_settings_that_cannot_work(config, section, key, value, message):
    config.validation.enable = True
    setattr(getattr(config, section), key, value)
    with pytest.raises(ConfigError, match=message):
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=2)


def test_a_validation_path_is_not_looked_at_while_validation_is_off(config):
    config.validation.dataset_path = "nowhere"
    build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)
    config.validation.enable = True
    with pytest.raises(ConfigError, match="nowhere"):
        build_loader(config, TOKENIZER, dp_rank=0, dp_size=1)


CHILD = """
import os, signal, sys, time
from titan_moe.config.job import JobConfig
from titan_moe.data import build_loader, build_tokenizer

config = JobConfig()
config.job.dump_folder, config.training.dataset, config.training.dataset_path = sys.argv[1], "text", sys.argv[2]
config.training.seq_len, config.training.num_workers = 2048, 2  # a batch is more than a pipe holds
stopped = []
loader = iter(build_loader(config, build_tokenizer("bytes"), dp_rank=0, dp_size=1))
next(loader)
# After the start, so that the workers do not inherit these.
if sys.argv[3] == "flag":
    signal.signal(signal.SIGTERM, lambda *_: stopped.append("TERM"))
    signal.signal(signal.SIGINT, lambda *_: stopped.append("INT"))
else:
    # A shell that runs the tests in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("ready", flush=True)
    while len(stopped) < 2:
        next(loader)
        time.sleep(0.01)
    for _ in range(50):
        next(loader)
    print("stopped after", *stopped)
except KeyboardInterrupt:
    print("interrupted")
"""


def start_child(mode, text, tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(text), mode]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, start_new_session=True, **pipes)
    assert child.stdout.readline() == "ready\n", child.communicate()[1]
    return child


def finish(child):
    """Its output, once it and the loader processes, which hold the pipes too, have ended."""
    try:
        return child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise


def test_signals_to_the_process_group_leave_the_workers_to_the_trainer(text, tmp_path):
    child = start_child("flag", text, tmp_path)
    for sent in (signal.SIGTERM, signal.SIGINT):
        os.killpg(child.pid, sent)
        time.sleep(0.3)
    out, err = finish(child)
    assert (out, err, child.returncode) == ("stopped after TERM INT\n", "", 0)


def test_ctrl_c_ends_the_process_and_its_workers_without_a_word(text, tmp_path):
    child = start_child("default", text, tmp_path)
    os.killpg(child.pid, signal.SIGINT)
    out, err = finish(child)
    assert (out, err, child.returncode) == ("interrupted\n", "", 0)


def test_closing_ends_a_worker_that_does_not_answer(config):
    config.training.num_workers = 1
    others = set(multiprocessing.active_children())
    loader = iter(build_loader(config, TOKENIZER, dp_rank=0, dp_size=1))
    next(loader)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGSTOP)
    loader.close()
    worker.join(timeout=10)
    assert worker.exitcode == -signal.SIGKILL


def test_workers_end_with_a_training_process_that_was_killed(text, tmp_path):
    child = start_child("default", text, tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    finish(child)  # the pipes close when the last worker is gone
    assert child.returncode == -signal.SIGKILL
