"""What does not fit or cannot be trusted is refused before a weight changes or a line of it runs."""

import os
import pickle
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, ChunkStorageMetadata
from training import differences, full_state, start, train

from titan_moe.checkpoint import Checkpointer, rng_tensors
from titan_moe.checkpoint.files import Manifest, checksum, read_manifest, write_manifest
from titan_moe.errors import CheckpointError


@pytest.fixture
def saved(tmp_path):
    model, optimizer = start()
    train(model, optimizer, [1])
    Checkpointer(tmp_path).save(1, model, optimizer, rank_tensors=rng_tensors())
    return tmp_path


def refused(folder, model, optimizer, match):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state_before = len(optimizer.state) if optimizer else 0
    with pytest.raises(CheckpointError, match=match) as error:
        Checkpointer(folder, read_only=True).load(model, optimizer)
    assert "\n" not in str(error.value)
    assert not differences(before, dict(model.state_dict()))
    assert optimizer is None or len(optimizer.state) == state_before


def test_missing_and_unexpected_names_are_listed(saved):
    model, optimizer = start(seed=2)
    model.extra = nn.Parameter(torch.zeros(2))
    del model.unused
    refused(saved, model, optimizer, r"1 missing: model\.extra; 1 unexpected: model\.unused")


def test_another_shape_is_listed_with_both_shapes(saved):
    model, _ = start(seed=2)
    model.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    refused(saved, model, None, r"1 of another shape: model\.unused \[2\] in the checkpoint, \[3\] in the model")


def test_another_dtype_is_listed_and_never_cast(saved):
    model, optimizer = start(seed=2, dtype=torch.float32)
    refused(saved, model, optimizer, r"of another dtype: model\.embed\.weight torch\.float64 in the checkpoint")


def test_a_long_list_is_cut_with_its_count(saved):
    model, _ = start(seed=2)
    for index in range(30):
        model.register_parameter(f"p{index:02}", nn.Parameter(torch.zeros(1)))
    refused(saved, model, None, r"30 missing: model\.p00, .*model\.p07 and 22 more")


def test_optimizer_state_that_is_not_there_is_an_error(tmp_path):
    model, optimizer = start()
    train(model, optimizer, [1])
    Checkpointer(tmp_path).save(1, model)
    refused(tmp_path, *start(seed=2), "no optimizer state")
    # A parameter frozen when saved and trained now has no moments to continue from.
    model.embed.weight.requires_grad_(False)
    frozen, frozen_optimizer = start(seed=1)
    frozen_optimizer.param_groups[0]["params"].pop(0)
    train(frozen, frozen_optimizer, [1])
    Checkpointer(tmp_path).save(2, frozen, frozen_optimizer)
    refused(tmp_path, *start(seed=2), r"lacks the optimizer state of embed\.weight")


def forge(folder, change):
    """Change the checkpoint's files, then make the manifest fit, as an attacker would."""
    target = folder / "step-1"
    manifest = read_manifest(target)
    change(target)
    names = [path.name for path in target.iterdir() if path.name != "manifest.json"]
    write_manifest(target, Manifest(1, manifest.serial, {name: checksum(target / name) for name in names}))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


class GetAttr:
    def __reduce__(self):
        return getattr, (str, "upper")


class GetAttrOfAllowed:
    def __reduce__(self):
        return getattr, (torch.Size, "__new__")


def rewrite_index(change):
    """A change of the unpickled index, pickled again."""

    def apply(folder):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    return apply


def outside_path(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../other"


def beyond_the_file(metadata):
    next(iter(metadata.storage_data.values())).offset = 10**9


def missing_chunk(metadata):
    metadata.state_dict_metadata["model.embed.weight"].chunks.clear()


def outside_the_tensor(metadata):
    entry = metadata.state_dict_metadata["model.embed.weight"]
    entry.chunks[0].offsets = torch.Size([-1, 0])


def oversized(metadata):
    metadata.state_dict_metadata["rank.0.rng_cpu"].size = torch.Size([2**50])


def overlapping(metadata):
    chunks = metadata.state_dict_metadata["model.embed.weight"].chunks
    (whole,) = chunks
    # Twice the first half: as many values as there are, but half of them nowhere.
    rows = whole.sizes[0] // 2
    halves = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 6])) for _ in range(2)]
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size([2 * rows, 6])
    chunks[:] = halves


def of_another_rank(metadata):
    entry = metadata.state_dict_metadata["model.embed.weight"]
    entry.chunks[0].offsets = torch.Size([0])


def negative_offset(metadata):
    next(iter(metadata.storage_data.values())).offset = -8


def negative_shape(metadata):
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size([-7, -6])


def in_the_same_bytes(metadata):
    places = list(metadata.storage_data.values())
    places[1].offset = places[0].offset + 1


def transformed(metadata):
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def not_stored(metadata):
    metadata.storage_data.clear()


def bytes_item(metadata):
    metadata.state_dict_metadata["model.embed.weight"] = BytesStorageMetadata()


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda metadata: Bomb(), r"\.metadata is refused: it asks for posix\.mkdir"),
        (lambda metadata: GetAttr(), r"\.metadata is refused: it asks for builtins\.str"),
        (lambda metadata: GetAttrOfAllowed(), r"\.metadata is refused: it asks for builtins\.getattr"),
        (lambda metadata: {"a": 1}, r"\.metadata is refused: it does not hold an index"),
        (outside_path, r"'\.\./other', outside the checkpoint's files"),
        (beyond_the_file, r"outside the checkpoint's files"),
        (missing_chunk, r"the chunks of model\.embed\.weight have 0 values instead of 42"),
        (outside_the_tensor, r"a chunk of model\.embed\.weight lies outside its shape \[7, 6\]"),
        (overlapping, r"chunks of model\.embed\.weight overlap"),
        (of_another_rank, r"\.metadata is damaged: ValueError"),
        (negative_offset, r"outside the checkpoint's files"),
        (negative_shape, r"model\.embed\.weight of shape \[-7, -6\] is larger than all files"),
        (in_the_same_bytes, r"are said to lie in the same bytes of __0_0\.distcp"),
        (transformed, r"is said to be stored transformed"),
        (oversized, r"rank\.0\.rng_cpu of shape \[1125899906842624\] is larger than all files"),
        (not_stored, r"is in no file"),
        (bytes_item, r"asks for .*BytesStorageMetadata"),
    ],
)
def test_a_hostile_index_is_refused_and_nothing_of_it_runs(saved, monkeypatch, change, match):
    monkeypatch.chdir(saved)
    forge(saved, rewrite_index(change))
    refused(saved, *start(seed=2), match)
    assert not (saved / "bomb").exists()


def test_an_index_that_names_enum_members_by_getattr_loads(tmp_path, monkeypatch):
    """As Python 3.11.2 pickles them; later versions call the enum instead."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    model, optimizer = start()
    train(model, optimizer, [1])
    Checkpointer(tmp_path).save(1, model, optimizer)
    assert b"getattr" in (tmp_path / "step-1" / ".metadata").read_bytes()
    other, _ = start(seed=2)
    Checkpointer(tmp_path).load(other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def replace_tensor(value):
    """``model.unused`` stored as something else."""

    def apply(folder):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        place = next(place for index, place in metadata.storage_data.items() if index.fqn == "model.unused")
        torch.save(value, folder / "bad.distcp")
        place.relative_path, place.offset = "bad.distcp", 0
        place.length = (folder / "bad.distcp").stat().st_size
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


@pytest.mark.parametrize(
    "value, match",
    [
        (Bomb(), r"model\.unused in .*bad\.distcp is not a stored tensor: UnpicklingError"),
        (torch.zeros(2), r"model\.unused in .*bad\.distcp is not what the index says: \[2\], torch\.float64"),
        (torch.zeros(3, dtype=torch.float64), r"is not what the index says"),
        ([1.0, 2.0], r"is not what the index says"),
    ],
)
def test_a_hostile_tensor_is_refused_and_nothing_of_it_runs(saved, monkeypatch, value, match):
    monkeypatch.chdir(saved)
    forge(saved, replace_tensor(value))
    refused(saved, *start(seed=2), match)
    assert not (saved / "bomb").exists()


def test_a_manifest_that_names_a_path_is_refused(saved):
    target = saved / "step-1"
    manifest = read_manifest(target)
    shutil.copy(target / "state.json", saved / "state.json")
    write_manifest(target, Manifest(1, 1, manifest.files | {"../state.json": checksum(saved / "state.json")}))
    refused(saved, *start(seed=2), "manifest.json is damaged")


def test_a_state_file_of_another_kind_is_refused(saved):
    forge(saved, lambda folder: (folder / "state.json").write_text("[1]"))
    refused(saved, *start(seed=2), "is not a checkpoint's state")


def test_what_is_excluded_keeps_its_values_and_need_not_fit(saved):
    model, optimizer = start(seed=2)
    train(model, optimizer, [1])
    model.unused = nn.Parameter(torch.full((3,), 5.0))
    before = full_state(model, optimizer)
    Checkpointer(saved).load(model, optimizer, exclude=["model.unused", "model.layers.0.*"])
    want, want_optimizer = start(seed=7)
    Checkpointer(saved).load(want, want_optimizer)
    loaded, now = full_state(want, want_optimizer), full_state(model, optimizer)
    left = {name for name in now if name.startswith(("unused", "layers.0."))}
    assert {"layers.0.w1", "layers.0.w1|exp_avg", "layers.0.expert_bias", "unused"} <= left
    assert not differences({name: now[name] for name in left}, {name: before[name] for name in left})
    rest = now.keys() - left
    assert not differences({name: now[name] for name in rest}, {name: loaded[name] for name in rest})


def test_excluding_what_is_not_there_is_an_error(saved):
    model, _ = start(seed=2)
    with pytest.raises(CheckpointError, match=r"exclude 'model\.lm_head\*' matches no tensor"):
        Checkpointer(saved).load(model, exclude=["model.lm_head*"])


def test_nothing_in_a_checkpoint_names_the_folder_it_was_written_to(saved):
    for path in (saved / "step-1").iterdir():
        assert str(saved).encode() not in path.read_bytes() and b"pathlib" not in path.read_bytes()
