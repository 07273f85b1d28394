"""What is written, and what survives when writing fails."""

import json
import os
import shutil

import pytest
import torch
from hf_tiny import equal, hf_model, tensors_of
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import titan_moe
from titan_moe import models
from titan_moe.errors import CheckpointError, ConfigError, TrainingError
from titan_moe.hf import folder, load_hf_weights

TOKENS = torch.arange(32).view(2, 16)


def test_shards_are_no_larger_than_asked_and_the_index_is_complete(qwen, tmp_path):
    ours = titan_moe.load_hf(qwen)
    titan_moe.save_hf(ours, tmp_path / "out", max_shard_gb=40e-6)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    seen = {}
    for file in files:
        with safe_open(tmp_path / "out" / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            seen |= dict.fromkeys(shard.keys(), file)
        tensors = load_file(tmp_path / "out" / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40e3
    assert index["weight_map"] == seen
    # As readable as any file that this process makes.
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {(qwen / "config.json").stat().st_mode}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(qwen).values())
    assert equal(tensors_of(tmp_path / "out"), tensors_of(qwen))
    with pytest.raises(CheckpointError, match="max_shard_gb = 0"):
        titan_moe.save_hf(ours, tmp_path / "out", max_shard_gb=0)


def test_an_export_replaces_the_earlier_one_and_keeps_other_files(qwen, tmp_path):
    ours = titan_moe.load_hf(qwen)
    titan_moe.save_hf(ours, tmp_path / "out", max_shard_gb=40e-6)
    (tmp_path / "out/tokenizer.json").write_text("{}")
    (tmp_path / "out/assets").mkdir()
    with torch.no_grad():
        ours.norm.weight.fill_(3)
    titan_moe.save_hf(ours, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("assets", "config.json", "model.safetensors", "tokenizer.json")
    ]
    assert tensors_of(tmp_path / "out")["model.norm.weight"].unique().tolist() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qwen"]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_swap_that_a_crash_cut_in_two_is_brought_to_its_end(renamed, qwen, tmp_path):
    ours = titan_moe.load_hf(qwen)
    titan_moe.save_hf(ours, tmp_path / "out")
    (tmp_path / "out/tokenizer.json").write_text("{}")
    # As a kill leaves it before, or after, the new export takes its name; with half a file of a third attempt.
    (tmp_path / "out").rename(tmp_path / ".out.old")
    if renamed:
        titan_moe.save_hf(ours, tmp_path / "new")
        (tmp_path / "new").rename(tmp_path / "out")
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp/0.part").write_bytes(b"half")
    titan_moe.save_hf(ours, tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert equal(tensors_of(tmp_path / "out"), tensors_of(qwen))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qwen"]


def test_an_export_that_cannot_take_its_name_puts_the_earlier_one_back(qwen, tmp_path, monkeypatch):
    ours = titan_moe.load_hf(qwen)
    titan_moe.save_hf(ours, tmp_path / "out")
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(".tmp"):
            raise OSError(5, os.strerror(5))
        rename(source, target)

    monkeypatch.setattr(folder.os, "rename", refuse)
    with pytest.raises(CheckpointError, match="nothing there was changed: Input/output error"):
        titan_moe.save_hf(ours, tmp_path / "out")
    assert equal(tensors_of(tmp_path / "out"), tensors_of(qwen))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qwen"]


def full_disk(file, name, tensor):
    raise OSError(28, os.strerror(28))


def test_a_full_disk_is_one_line_and_leaves_the_earlier_export(qwen, tmp_path, monkeypatch):
    ours = titan_moe.load_hf(qwen)
    titan_moe.save_hf(ours, tmp_path / "out")
    before = tensors_of(tmp_path / "out")
    with torch.no_grad():
        ours.norm.weight.fill_(3)
    monkeypatch.setattr(folder.ShardFile, "write", full_disk)
    with pytest.raises(CheckpointError, match="nothing there was changed: No space left on device") as error:
        titan_moe.save_hf(ours, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert equal(tensors_of(tmp_path / "out"), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "qwen"]


def test_too_little_space_is_seen_before_writing(qwen, tmp_path, monkeypatch):
    ours = titan_moe.load_hf(qwen)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="1 MB needed, 0 MB free on the disk"):
        titan_moe.save_hf(ours, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_targets_that_are_no_export(qwen, tmp_path):
    ours = titan_moe.load_hf(qwen)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="it is a file; give a folder"):
        titan_moe.save_hf(ours, tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"holds other files and no config\.json"):
        titan_moe.save_hf(ours, tmp_path)
    with pytest.raises(CheckpointError, match="file/out: the export failed"):
        titan_moe.save_hf(ours, tmp_path / "file/out")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    titan_moe.save_hf(ours, tmp_path / "empty")
    titan_moe.save_hf(ours, tmp_path / "a/b/c")
    assert equal(tensors_of(tmp_path / "a/b/c"), tensors_of(tmp_path / "empty"))


def test_token_ids_of_the_source_survive_and_its_quantisation_does_not(tmp_path):
    theirs = hf_model("Qwen3Moe", eos_token_id=[2, 5])
    theirs.config.quantization_config = {"quant_method": "fp8"}
    titan_moe.save_hf(titan_moe.load_hf(theirs), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == [2, 5] and config["pad_token_id"] == 0
    assert "quantization_config" not in config


@pytest.mark.parametrize(
    "family, override, message",
    [
        ("kimi_k2", {"score_function": "softmax"}, "score_function = 'softmax'.*has 'sigmoid'"),
        ("deepseek_v3", {"score_function": "softmax", "normalize_weights": False}, "V2ForCausalLM has False"),
        ("mixtral", {"normalize_weights": False}, "normalize_weights = False"),
        ("qwen3_moe", {"activation": "geglu"}, "activation = 'geglu'"),
        ("qwen3_moe", {"shared_hidden_dim": 64}, "shared_hidden_dim = 64"),
        ("deepseek_v3", {"shared_hidden_dim": 100}, "shared_hidden_dim = 100"),
        ("gpt_oss", {"selection": "expert_choice"}, "selection = 'expert_choice'"),
    ],
)
def test_a_model_that_transformers_cannot_express_is_not_exported(family, override, message, tmp_path):
    model = models.build(family, "debug", num_layers=1, num_dense_layers=0, **override)
    with pytest.raises(ConfigError, match=message):
        titan_moe.save_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gradients_are_asked_for_by_name_and_missing_ones_are_named(qwen):
    ours = titan_moe.load_hf(qwen)
    with pytest.raises(TrainingError, match=r"No gradient on embed_tokens\.weight \(25 such\)"):
        list(titan_moe.iter_hf_tensors(ours, source="gradient"))
    ours.embed_tokens.weight.requires_grad_(False)
    ours(TOKENS).sum().backward()
    names = [name for name, _ in titan_moe.iter_hf_tensors(ours, source="gradient")]
    assert "model.embed_tokens.weight" not in names and "lm_head.weight" in names
    with pytest.raises(CheckpointError, match="source = 'gradients'"):
        list(titan_moe.iter_hf_tensors(ours, source="gradients"))


def test_a_tensor_without_a_hugging_face_name_is_an_error(qwen):
    ours = titan_moe.load_hf(qwen)
    ours.layers["0"].extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"layers\.0\.extra\.weight: Hugging Face's qwen3_moe has no name"):
        list(titan_moe.iter_hf_tensors(ours))


def sharded_round_trip(folder: str, out: str) -> dict[str, torch.Tensor]:
    ours = titan_moe.load_hf(folder)
    for layer in ours.layers.values():
        fully_shard(layer)
    fully_shard(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    load_hf_weights(ours, folder)
    ours(TOKENS).square().sum().backward()
    titan_moe.save_hf(ours, out, max_shard_gb=40e-6)
    with pytest.raises(CheckpointError, match="it is a file"):
        titan_moe.save_hf(ours, f"{folder}/config.json")
    return dict(titan_moe.iter_hf_tensors(ours, source="gradient"))


def test_a_sharded_model_loads_and_exports_and_a_failure_reaches_every_rank(qwen, tmp_path, run_ranks):
    gradients = run_ranks(2, sharded_round_trip, str(qwen), str(tmp_path / "out"))
    assert equal(tensors_of(tmp_path / "out"), tensors_of(qwen))
    alone = titan_moe.load_hf(qwen)
    alone(TOKENS).square().sum().backward()
    # Both ranks saw the same tokens, so the mean over ranks is what one process has, up to fp32 rounding.
    for name, gradient in titan_moe.iter_hf_tensors(alone, source="gradient"):
        for rank in range(2):
            torch.testing.assert_close(gradients[rank][name], gradient, msg=name)


def test_a_file_of_many_dtypes_is_aligned_and_takes_its_tensors_in_any_order(tmp_path):
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "odd": torch.arange(3).bfloat16(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "eight": torch.arange(3).to(torch.float8_e4m3fn),
        "transposed": torch.randn(3, 2, dtype=torch.float64).T,
        "none": torch.empty(0, 4),
        "wide": torch.randn(2, 3),
    }
    file = folder.ShardFile(tmp_path / "x", [folder.Entry(n, tuple(t.shape), t.dtype) for n, t in tensors.items()])
    for name in ("wide", "odd", "none", "bytes", "transposed", "scalar", "eight"):
        file.write(name, tensors[name])
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].float(), tensor.float()), name
    content = (tmp_path / "x").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name
