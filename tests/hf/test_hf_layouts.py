"""Hugging Face weights in and out under layouts of eight processes: every name, dtype and bit comes back."""

import json
from pathlib import Path

import pytest
import torch
from hf_tiny import equal, hf_model, tensors_of
from tiny_families import FAMILIES

import titan_moe
from titan_moe.config.job import Parallelism
from titan_moe.errors import CheckpointError
from titan_moe.hf import load_hf_weights, save_hf
from titan_moe.hf.config import config_from_hf
from titan_moe.parallelize import build_meshes, build_model

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tp2 ep4": {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
    "pp2 tp2 ep2 etp2": {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 2,
        "expert_tensor_parallel_degree": 2,
    },
    "pp2 vpp2 hsdp": {
        "pipeline_parallel_degree": 2,
        "virtual_pipeline_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_microbatch_size": 1,
        "data_parallel_replicate_degree": 2,
        "expert_parallel_degree": 2,
    },
}


def build(folder, layout, dtype=torch.float32):
    """The stages of this rank, all weights 0."""
    parallelism = Parallelism(**layout)
    config = config_from_hf(json.loads((Path(folder) / "config.json").read_text()))
    runner = build_model(
        config, parallelism, build_meshes(parallelism), device=torch.device("cpu"), dtype=dtype, seed=None
    )
    with torch.no_grad():
        for module in runner.modules:
            for parameter in module.parameters():
                parameter.zero_()
    return runner.modules


def through(folders, layout, kind):
    for folder in folders:
        stages = build(folder, layout)
        load_hf_weights(stages, folder)
        save_hf(stages, f"{folder}-{kind}", "source", max_shard_gb=60e-6)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_comes_back_bit_equal_from_eight_processes(layout, kind, tmp_path, run_ranks):
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path / family
        # Three layers, so that four stages have something each; attention of one kind in GPT-OSS every second layer.
        layers = {"num_hidden_layers": 3}
        if family == "GptOss":
            layers["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
        hf_model(family, **layers).to(getattr(torch, kind)).save_pretrained(folders[family])
    run_ranks(8, through, [str(folder) for folder in folders.values()], LAYOUTS[layout], kind, timeout=300.0)
    for family, folder in folders.items():
        before, after = tensors_of(folder), tensors_of(Path(f"{folder}-{kind}"))
        assert equal(after, before), family
        assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}, family
        index = json.loads((Path(f"{folder}-{kind}") / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == before.keys()


def stream(folder, layout):
    stages = build(folder, layout)
    load_hf_weights(stages, folder)
    whole = {name: tensor.clone() for name, tensor in titan_moe.iter_hf_tensors(stages)}
    shards = [(name, tuple(shard)) for name, shard in titan_moe.iter_hf_tensors(stages, shard=True)]
    return whole, [(name, tensor.clone(), index, shape) for name, (tensor, index, shape) in shards]


@pytest.mark.parametrize("family", ["DeepseekV3", "GptOss"])
def test_every_rank_streams_every_tensor_and_its_own_parts(family, tmp_path, run_ranks):
    hf_model(family).save_pretrained(tmp_path)
    expected = tensors_of(tmp_path)
    layout = LAYOUTS["pp2 tp2 ep2 etp2"]
    put_together = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for whole, shards in run_ranks(8, stream, str(tmp_path), layout):
        assert equal(whole, expected)
        assert sum(tensor.numel() for _, tensor, _, _ in shards) < sum(t.numel() for t in expected.values())
        for name, tensor, index, shape in shards:
            assert shape == tuple(expected[name].shape)
            put_together[name][index] = tensor
    assert equal(put_together, expected)


def fail_on_one_rank(folder, out):
    from titan_moe.hf import folder as written

    stages = build(folder, LAYOUTS["pp2 tp2 ep2 etp2"])
    load_hf_weights(stages, folder)
    if torch.distributed.get_rank() == 5:

        def full_disk(file, name, tensor):
            raise OSError(28, "No space left on device")

        original, written.ShardFile.write = written.ShardFile.write, full_disk
    with pytest.raises(CheckpointError, match="nothing there was changed: No space left on device"):
        save_hf(stages, out, max_shard_gb=20e-6)
    if torch.distributed.get_rank() == 5:
        written.ShardFile.write = original
    save_hf(stages, out, max_shard_gb=20e-6)


def test_a_full_disk_on_one_writer_is_reported_by_all_and_leaves_nothing(tmp_path, run_ranks):
    hf_model("Qwen3Moe").save_pretrained(tmp_path / "in")
    run_ranks(8, fail_on_one_rank, str(tmp_path / "in"), str(tmp_path / "out"))
    assert equal(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "in"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def train_without_moving(folder, dump, options):
    from titan_moe.config import load_config
    from titan_moe.trainer import train

    argv = f"""--job.dump_folder {dump} --model.name qwen3_moe --training.steps 1 --training.seq_len 16
        --training.global_batch_size 2 --training.local_batch_size 2 --training.num_workers 0 --training.max_norm 0
        --optimizer.lr 1e-300 --metrics.no_enable_tensorboard --checkpoint.enable --checkpoint.initial_load_in_hf
        --checkpoint.initial_load_path {folder} --checkpoint.last_save_in_hf --checkpoint.export_dtype source"""
    for name, value in OVERRIDE.items():
        argv += f" --model.override.{name} {value}"
    train(load_config([*argv.split(), *options]))


OVERRIDE = {"num_layers": 3, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden_dim": 32}
OVERRIDE |= {"vocab_size": 264, "num_experts": 8, "max_seq_len": 128}


def test_a_pipelined_run_starts_from_hugging_face_weights_and_ends_with_them(tmp_path, run_ranks):
    hf_model("Qwen3Moe", vocab_size=264, num_hidden_layers=3).bfloat16().save_pretrained(tmp_path / "in")
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = ["--training.dataset", "text", "--training.dataset_path", str(text)]
    options += ["--parallelism.pipeline_parallel_degree", "2"]
    for _ in range(2):
        # A step so small that nothing moves; the second run resumes from its checkpoint and only exports again.
        run_ranks(2, train_without_moving, str(tmp_path / "in"), str(tmp_path / "run"), options)
        before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "run/hf")
        assert equal(after, before)
        assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
