"""Nothing is lost at any moment a machine may die, and nothing damaged is loaded."""

import json
import logging
import os
import random
import resource
import signal
import time

import pool
import pytest
import torch
import torch.distributed as dist
from crashing import save_forever, stamp, stamped_step
from torch import nn
from training import differences, full_state, network, start

from titan_moe.checkpoint import Checkpointer
from titan_moe.checkpoint.files import read_manifest
from titan_moe.checkpoint.inspection import main as inspect
from titan_moe.distributed import gather_objects
from titan_moe.errors import CheckpointError


def newest(folder):
    model = network()
    loaded = Checkpointer(folder, read_only=True).load(model)
    if loaded is None:
        return 0
    assert stamped_step(model) == loaded.step == loaded.extra["step"]
    return loaded.step


def kill_repeatedly(folder, kills, world=1):
    chance = random.Random(0)
    last = newest(folder)
    for attempt in range(kills):
        store = str(folder / f"store{attempt}")
        processes = [
            pool.context.Process(target=save_forever, args=(str(folder), world, r, store)) for r in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 60
        while not any(int(path.name.split("-")[1]) > last for path in folder.glob("step-*") if path.suffix == ""):
            assert time.monotonic() < deadline and all(process.is_alive() for process in processes)
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.08))
        victim = processes[chance.randrange(world)]
        victim.kill()
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        for process in processes:
            process.join(20)
            process.kill()
            process.join()
        now = newest(folder)
        assert now > last, "a complete checkpoint was lost"
        last = now
    Checkpointer(folder)
    assert not [path for path in folder.glob("step-*") if path.suffix]


def test_killed_while_saving_the_newest_complete_checkpoint_loads(tmp_path):
    kill_repeatedly(tmp_path, 4)


@pytest.mark.slow
@pytest.mark.parametrize("world, kills", [(1, 60), (2, 30)])
def test_killed_while_saving_many_times(tmp_path, world, kills):
    kill_repeatedly(tmp_path, kills, world)


def three_checkpoints(folder, **options):
    model = network()
    checkpointer = Checkpointer(folder, **options)
    for step in (1, 2, 3):
        stamp(model, step)
        checkpointer.save(step, model, extra={"step": step})
    return checkpointer


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, os.remove])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json", "manifest.json"])
def test_a_damaged_file_is_named_and_the_newest_complete_checkpoint_loads_instead(tmp_path, caplog, damage, name):
    checkpointer = three_checkpoints(tmp_path)
    damage(tmp_path / "step-3" / name)
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path) == 2
    assert name in caplog.text and "step-3" in caplog.text and "step-2 instead" in caplog.text
    with pytest.raises(CheckpointError, match=name):
        checkpointer.load(network(), step=3)
    assert checkpointer.latest() == (3 if damage is flip and name != "manifest.json" else 2)


def test_two_hundred_flipped_bits_are_noticed_and_named(tmp_path, capsys):
    folder = Checkpointer(tmp_path).save(1, network())
    chance = random.Random(1)
    model = network(seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [".metadata", "__0_0.distcp", "manifest.json", "state.json"]
    for number in range(200):
        path = paths[number % 4]
        original = path.read_bytes()
        content, ends = bytearray(original), [0, len(original) - 1]
        position = ends[number // 4] if number < 8 else chance.randrange(len(original))
        content[position] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=path.name):
            Checkpointer(tmp_path, read_only=True).load(model)
        noticed_by_inspect(folder, path, capsys)
        path.write_bytes(original)
    for path in paths:
        original = path.read_bytes()
        path.write_bytes(original[: len(original) // 2])
        with pytest.raises(CheckpointError, match=path.name):
            Checkpointer(tmp_path, read_only=True).load(model, step=1)
        noticed_by_inspect(folder, path, capsys)
        path.write_bytes(original)
    assert not differences(before, dict(model.state_dict()))
    inspect([str(folder)])


def noticed_by_inspect(folder, path, capsys):
    with pytest.raises((SystemExit, CheckpointError)) as end:
        inspect([str(folder)])
    said = capsys.readouterr().out if isinstance(end.value, SystemExit) else str(end.value)
    assert path.name in said and getattr(end.value, "code", 1) == 1


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    checkpointer = three_checkpoints(tmp_path, keep_latest_k=1)
    flip(tmp_path / "step-3" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint to load .*__0_0\.distcp"):
        checkpointer.load(network())


def test_an_empty_folder_loads_nothing_and_an_unknown_step_lists_the_known_ones(tmp_path):
    model = network()
    assert Checkpointer(tmp_path / "new").load(model) is None
    assert Checkpointer(tmp_path / "absent", read_only=True).latest() is None
    assert not (tmp_path / "absent").exists()
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; steps there are: 1, 2, 3"):
        three_checkpoints(tmp_path).load(model, step=7)


def test_keep_latest_k_removes_the_oldest_and_never_counts_damaged_ones(tmp_path):
    assert three_checkpoints(tmp_path / "a", keep_latest_k=2).steps() == [2, 3]
    assert three_checkpoints(tmp_path / "b", keep_latest_k=0).steps() == [1, 2, 3]
    checkpointer = three_checkpoints(tmp_path / "c", keep_latest_k=2)
    truncate(tmp_path / "c" / "step-3" / "__0_0.distcp")
    checkpointer.save(4, network())
    assert checkpointer.steps() == [2, 4]


def test_leftovers_of_killed_runs_go_and_a_checkpoint_being_replaced_comes_back(tmp_path):
    three_checkpoints(tmp_path)
    (tmp_path / "step-9.tmp-abc").mkdir()
    (tmp_path / "step-9.tmp-abc" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / "step-3").rename(tmp_path / "step-3.old-1")
    (tmp_path / "notes").mkdir()
    Checkpointer(tmp_path, read_only=True)
    assert (tmp_path / "step-9.tmp-abc").exists()
    assert Checkpointer(tmp_path).steps() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-1", "step-2", "step-3"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_with_a_checkpoints_name_does_not_stop_the_run(tmp_path, kind):
    checkpointer = three_checkpoints(tmp_path / "c")
    for name in ("step-4", "step-9.old-1"):
        if kind == "file":
            (tmp_path / "c" / name).write_text("x")
        else:
            (tmp_path / "c" / name).symlink_to(tmp_path / "gone")
    checkpointer.save(4, network())
    assert checkpointer.steps() == [1, 2, 3, 4]
    (tmp_path / "c" / "step-9").mkdir()
    Checkpointer(tmp_path / "c")
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == ["step-1", "step-2", "step-3", "step-4", "step-9"]


def test_the_serial_counts_on_and_the_manifest_covers_every_file(tmp_path):
    three_checkpoints(tmp_path)
    manifest = read_manifest(tmp_path / "step-3")
    assert manifest.serial == 3
    assert manifest.files.keys() | {"manifest.json"} == {path.name for path in (tmp_path / "step-3").iterdir()}


def save_onto_a_full_disk(folder, full_rank, mode="disabled"):
    """The second save runs into a file-size limit on one rank, as it would into a full disk."""
    checkpointer = Checkpointer(folder, async_mode=mode)
    model, optimizer = start(dtype=torch.float32)
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    before = full_state(model, optimizer)
    model.big = nn.Parameter(torch.zeros(40_000 + full_rank))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not dist.is_initialized() or dist.get_rank() == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-2.*: File too large$"):
            # Every rank writes as much, whichever the planner gives the shared tensor to.
            tensors = {"noise": torch.zeros(40_000)}
            checkpointer.save(2, model, optimizer, rank_tensors=tensors)
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    del model.big
    gather_objects(None)  # rank 0 removes the torn folder while the others go on
    assert [path.name for path in checkpointer.folder.iterdir()] == ["step-1"]
    fresh, fresh_optimizer = start(seed=4, dtype=torch.float32)
    assert checkpointer.load(fresh, fresh_optimizer).step == 1
    assert not differences(full_state(fresh, fresh_optimizer), before)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_keeps_the_last_complete_checkpoint_and_removes_the_torn_one(tmp_path, mode):
    save_onto_a_full_disk(tmp_path, 0, mode)


@pytest.mark.parametrize("full_rank, mode", [(0, "disabled"), (1, "disabled"), (1, "async")])
def test_a_full_disk_on_one_rank_raises_on_all(run_ranks, tmp_path, full_rank, mode):
    run_ranks(2, save_onto_a_full_disk, tmp_path, full_rank, mode)


def unusable_folders(folder):
    with pytest.raises(CheckpointError, match=r"checkpoint folder .*file cannot be used"):
        Checkpointer(folder / "file")
    checkpointer = Checkpointer(folder / "gone")
    dist.barrier()
    if dist.get_rank() == 0:
        os.rmdir(folder / "gone")
    with pytest.raises(CheckpointError, match=r"saving step 1 in .*gone failed"):
        checkpointer.save(1, start()[0])


def test_a_file_in_place_of_the_folder_and_a_folder_that_vanished(run_ranks, tmp_path):
    (tmp_path / "file").write_text("x")
    run_ranks(2, unusable_folders, tmp_path)


def damaged_on_two_ranks(folder):
    model, _ = start()
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model)
    folder = checkpointer.save(2, model)
    dist.barrier()
    if dist.get_rank() == 1:
        flip(folder / "__1_0.distcp")
    dist.barrier()
    return checkpointer.load(model).step


def test_ranks_agree_on_the_checkpoint_when_one_finds_damage(run_ranks, tmp_path):
    assert run_ranks(2, damaged_on_two_ranks, tmp_path) == [1, 1]


def test_state_file_is_json_with_full_precision(tmp_path):
    folder = Checkpointer(tmp_path).save(1, network(), extra={"lr": 1 / 3})
    assert json.loads((folder / "state.json").read_text())["extra"]["lr"] == 1 / 3
