"""Layouts that cannot run, given on the command line: one line with the legal values, before any rank starts."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from titan_moe import launch
from titan_moe.cli import main

PARITY, DEBUG = (str(Path(__file__).parents[2] / "train_configs" / f"{name}.toml") for name in ("parity", "debug"))

# What is asked of 8 processes for parity.toml: 4 layers, 1 MTP layer, 8 experts in 4 groups, sequences of 64.
REFUSED = {
    "ep that does not divide": (
        {"expert_parallel_degree": 3},
        ["ep 3 x etp 1 = 3", "dense layout: pp 1 x dp_replicate 1 x dp_shard 8", "with etp 1: 1, 2, 4, 8."],
    ),
    "layout with the wrong number of layers": (
        {"pipeline_parallel_degree": 2, "pipeline_parallel_layout": "Ettt|mL"},
        ["'Ettt|mL' has 3 't' (decoder layers); the model has 4."],
    ),
    "tp that does not divide the kv heads": (
        {"job.config_file": DEBUG, "tensor_parallel_degree": 4, "model.override": "num_heads = 4\nnum_kv_heads = 2"},
        ["tensor_parallel_degree = 4", "num_kv_heads = 2", "for 4 heads and 2 key-value heads: 1, 2."],
    ),
    "cp that does not divide the sequence": (
        {"context_parallel_degree": 8, "training.seq_len": "60"},
        ["training.seq_len = 60", "Nearest legal: 48 or 64."],
    ),
    "too few micro-batches": (
        {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatch_size": 4},
        ["2 micro-batches are too few: 1F1B with pipeline_parallel_degree 4 needs at least 4.", "to at most 2"],
    ),
    "too few micro-batches for two directions": (
        {
            "pipeline_parallel_degree": 2,
            "virtual_pipeline_degree": 2,
            "pipeline_parallel_schedule": "DualPipeV",
            "pipeline_parallel_microbatch_size": 2,
        },
        ["2 micro-batches are too few: DualPipeV with pipeline_parallel_degree 2 needs at least 4.", "to at most 1"],
    ),
    "a schedule that does not exist, without a pipeline": (
        {"pipeline_parallel_schedule": "1f1b"},
        ["pipeline_parallel_schedule = '1f1b': unknown. Did you mean '1F1B'?"],
    ),
    "expert parallelism of a dense model": (
        {"expert_parallel_degree": 8, "model.override": "num_dense_layers = 4\nmtp_depth = 0"},
        ["expert_parallel_degree = 8", "all 4 layers are dense", "Set both to 1."],
    ),
    "resharding under a pipeline": (
        {"pipeline_parallel_degree": 2, "fsdp_reshard_after_forward": "always"},
        ["fsdp_reshard_after_forward = 'always'", "Use 'default' or 'never'."],
    ),
    "experts that leave FSDP nothing to split": (
        {"expert_parallel_degree": 8, "model.override": "num_experts = 9\nnum_groups = 1\ntopk_groups = 1"},
        ["expert_parallel_degree = 8 with 9 experts", "leave 3 without experts", "degree here: 1, 2."],
    ),
    "a dispatcher whose package is missing": (
        {"expert_parallel_degree": 8, "moe.dispatcher": "deepep"},
        ["moe.dispatcher = 'deepep' needs the package deep_ep", "or set moe.dispatcher = 'alltoall'."],
    ),
    "etp that leaves a rank without hidden dims": (
        {"expert_tensor_parallel_degree": 8, "model.override": "hidden_dim = 9"},
        ["expert_tensor_parallel_degree = 8", "hidden_dim = 9", "Nearest legal expert_tensor_parallel_degree: 5."],
    ),
}


def _words(keys: dict) -> list[str]:
    words = []
    for key, value in keys.items():
        if key == "model.override":
            for line in value.splitlines():
                name, _, number = line.partition(" = ")
                words += [f"--model.override.{name}", number]
        else:
            words += [f"--{key}" if "." in key else f"--parallelism.{key}", str(value)]
    return words


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_cannot_run_is_one_line_and_exit_code_2(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NGPU", "8")
    monkeypatch.delenv("COMM_MODE", raising=False)
    monkeypatch.setattr(launch, "_torchrun", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    keys, parts = REFUSED[name]
    with pytest.raises(SystemExit) as end:
        main(["train", *_words({"job.config_file": PARITY, "job.dump_folder": tmp_path, **keys})])
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("titan-moe: error: ") and captured.err.count("\n") == 1 and captured.out == ""
    assert not [part for part in parts if part not in captured.err], captured.err
    assert not dist.is_initialized()


def test_a_layout_that_can_run_starts_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPU", "8")
    monkeypatch.delenv("COMM_MODE", raising=False)
    monkeypatch.setattr(launch, "_torchrun", lambda *_: 77)
    keys = {"job.config_file": PARITY, "job.dump_folder": tmp_path, "tensor_parallel_degree": 2}
    with pytest.raises(SystemExit) as end:
        main(["train", *_words({**keys, "expert_parallel_degree": 8})])
    assert end.value.code == 77
