"""Exact resumption, and the same full tensors on another number of processes."""

import json
from collections import Counter
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from training import differences, full_state, start, train

from titan_moe.checkpoint import Checkpointer, restore_rng, rng_tensors, tensors


def uninterrupted(steps):
    model, optimizer = start()
    train(model, optimizer, range(1, steps + 1))
    return full_state(model, optimizer)


def train_and_save(folder, steps, replicate=1):
    model, optimizer = start(replicate=replicate)
    train(model, optimizer, range(1, steps + 1))
    extra = {"lr": 0.1 + 0.2, "loader": {"sample": 17}}
    Checkpointer(folder).save(steps, model, optimizer, extra=extra, rank_tensors=rng_tensors())
    return full_state(model, optimizer)


def load_and_train(folder, steps, replicate=1):
    """Start from other weights and another RNG state, load, train on; state right after loading and at the end."""
    model, optimizer = start(seed=99, replicate=replicate)
    torch.rand(5)
    loaded = Checkpointer(folder).load(model, optimizer)
    assert loaded.extra == {"lr": 0.1 + 0.2, "loader": {"sample": 17}}
    restore_rng(loaded.rank_tensors)
    after_load = full_state(model, optimizer)
    train(model, optimizer, range(loaded.step + 1, steps + 1))
    return after_load, full_state(model, optimizer), sorted(loaded.rank_tensors)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_run_is_bitwise_the_uninterrupted_one(run_ranks, tmp_path, ranks):
    want = run_ranks(ranks, uninterrupted, 6)
    saved = run_ranks(ranks, train_and_save, str(tmp_path), 3)
    answers = run_ranks(ranks, load_and_train, str(tmp_path), 6)
    for rank, (after_load, end, rank_tensors) in enumerate(answers):
        assert not differences(after_load, saved[rank])
        assert not differences(end, want[rank])
        assert rank_tensors == ["rng_cpu"]
    assert differences(answers[0][0], answers[0][1])


def test_resumed_run_without_a_process_group_is_bitwise_the_uninterrupted_one(tmp_path):
    want = uninterrupted(6)
    train_and_save(tmp_path, 3)
    _, end, _ = load_and_train(tmp_path, 6)
    assert not differences(end, want)
    assert "unused|step" not in end and end["embed.weight|step"] == 6


@pytest.mark.parametrize(
    "save_ranks, save_replicate, layouts", [(2, 1, [(4, 1), (4, 2)]), (4, 2, [(1, 1), (2, 1)]), (1, 1, [(3, 1)])]
)
def test_fault_27_full_tensors_and_moments_survive_another_number_of_processes(
    run_ranks, tmp_path, save_ranks, save_replicate, layouts
):
    saved = run_ranks(save_ranks, train_and_save, str(tmp_path), 2, save_replicate)[0]
    assert {"layers.0.w1|exp_avg", "layers.0.w1|exp_avg_sq", "layers.0.w1|step"} <= saved.keys()
    for ranks, replicate in layouts:
        for after_load, _, rank_tensors in run_ranks(ranks, load_and_train, str(tmp_path), 2, replicate):
            assert not differences(after_load, saved), (ranks, replicate)
            assert rank_tensors == []
    after_load, end, _ = load_and_train(tmp_path, 3)
    assert not differences(after_load, saved) and differences(end, saved)


def load_own(folder):
    model, optimizer = start()
    loaded = Checkpointer(folder, read_only=True).load(model, optimizer)
    return dist.get_rank(), loaded.rank_tensors["rng_cpu"]


def save_own(folder):
    model, optimizer = start()
    torch.manual_seed(100 + dist.get_rank())
    Checkpointer(folder).save(1, model, optimizer, rank_tensors=rng_tensors())
    return torch.get_rng_state()


def test_every_rank_gets_its_own_rng_back(run_ranks, tmp_path):
    states = run_ranks(2, save_own, str(tmp_path))
    assert not torch.equal(states[0], states[1])
    for rank, state in run_ranks(2, load_own, str(tmp_path)):
        assert torch.equal(state, states[rank])


def test_fault_29_load_train_save_load_gives_the_latest_values(tmp_path):
    model, optimizer = start()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(2, model, optimizer)
    train(model, optimizer, range(3, 5))
    checkpointer.save(4, model, optimizer)

    model, optimizer = start(seed=5)
    assert checkpointer.load(model, optimizer, step=2).step == 2
    train(model, optimizer, range(13, 15))
    latest = full_state(model, optimizer)
    checkpointer.save(4, model, optimizer)
    checkpointer.save(3, model, optimizer)
    assert checkpointer.steps() == [2, 4, 3] and checkpointer.latest() == 3

    model, optimizer = start(seed=6)
    assert checkpointer.load(model, optimizer, step=4).step == 4
    assert not differences(full_state(model, optimizer), latest)
    model, optimizer = start(seed=6)
    assert Checkpointer(tmp_path).load(model, optimizer).step == 3
    assert not differences(full_state(model, optimizer), latest)


class Compiled(nn.Module):
    """Named as torch.compile's wrapper names it."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_names_are_free_of_compile_and_recompute_wrappers(tmp_path):
    model, optimizer = start()
    train(model, optimizer, [1])
    Checkpointer(tmp_path).save(1, model, optimizer)
    wrapped, wrapped_optimizer = start(seed=3)
    wrapped.layers["0"] = Compiled(wrapped.layers["0"])
    assert "layers.0._orig_mod.w1" in dict(wrapped.named_parameters())
    Checkpointer(tmp_path).load(wrapped, wrapped_optimizer)
    assert torch.equal(wrapped.layers["0"]._orig_mod.w1, model.layers["0"].w1)


def test_weights_alone_load_from_a_checkpoint_with_optimizer(tmp_path):
    model, optimizer = start()
    train(model, optimizer, [1])
    folder = Checkpointer(tmp_path).save(1, model, optimizer, extra={"x": None})
    fresh, _ = start(seed=3)
    loaded = Checkpointer(tmp_path, read_only=True).load(fresh)
    assert loaded.folder == folder and loaded.extra == {"x": None}
    assert not differences(dict(fresh.state_dict()), dict(model.state_dict()))


def test_shared_parameters_are_saved_once_and_transient_buffers_never(tmp_path):
    model, optimizer = start()
    folder = Checkpointer(tmp_path).save(1, model, optimizer)
    names = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    assert "model.embed.weight" in names and not names & {"model.head.weight", "model.positions"}
    assert "model.layers.1.expert_bias" in names
    assert json.loads((folder / "state.json").read_text())["step"] == 1


class Counted:
    """A file that adds what is read of it to ``total``."""

    total: ClassVar[Counter] = Counter()

    def __init__(self, path, mode):
        self.file, self.name = open(path, mode), path.name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def seek(self, offset):
        self.file.seek(offset)

    def read(self, size):
        data = self.file.read(size)
        self.total[self.name] += len(data)
        return data


def count_what_is_read(folder, replicate):
    model, optimizer = start(seed=99, replicate=replicate)
    Counted.total = Counter()
    tensors.open = Counted
    try:
        Checkpointer(folder, read_only=True).load(model, optimizer)
    finally:
        del tensors.open
    return Counted.total


def test_in_the_layout_that_saved_each_byte_is_read_once(run_ranks, tmp_path):
    run_ranks(2, train_and_save, str(tmp_path), 2)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-2").glob("*.distcp")}
    assert len(sizes) == 2
    replicated = 0
    for rank, read in enumerate(run_ranks(2, count_what_is_read, str(tmp_path), 1)):
        own = f"__{rank}_0.distcp"
        assert read.pop(own) == sizes[own]
        replicated += read.total()
    # Of the other's file only what both hold whole: buffers, step counts and what is too small to cut.
    index = FileSystemReader(tmp_path / "step-2").read_metadata()
    whole = [name for name, entry in index.state_dict_metadata.items() if len(entry.chunks) == 1]
    places = [place.length for key, place in index.storage_data.items() if key.fqn in whole and "rank." not in key.fqn]
    assert 0 < replicated == sum(places)


def test_one_process_reads_each_byte_of_what_two_saved_once(run_ranks, tmp_path):
    run_ranks(2, train_and_save, str(tmp_path), 2)
    (read,) = run_ranks(1, count_what_is_read, str(tmp_path), 1)
    assert read == {path.name: path.stat().st_size for path in (tmp_path / "step-2").glob("*.distcp")}
