"""A dry run of one rank: its numbers against those of real ranks, and the largest configuration of all."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from degree_names import NAMES
from torch.distributed.tensor import DTensor

from titan_moe.config import JobConfig, load_config
from titan_moe.dry_run import fake_run
from titan_moe.errors import ConfigError
from titan_moe.models import config as model_config
from titan_moe.models import init_parameters
from titan_moe.parallelize.apply import parallelize
from titan_moe.parallelize.mesh import build_meshes
from titan_moe.parallelize.split import split_model

ROOT = Path(__file__).parents[1]
BIG = ROOT / "train_configs" / "deepseek_v3_671b_h100.toml"
SIZES = {"dim": 32, "ffn_dim": 48, "hidden_dim": 16, "shared_hidden_dim": 16, "vocab_size": 40, "mtp_depth": 1}


def job(**degrees):
    config = JobConfig()
    config.model.name = "deepseek_v3"
    config.model.override = dict(SIZES)
    config.training.seq_len, config.training.local_batch_size = 16, 8
    for name, value in degrees.items():
        setattr(config.parallelism, NAMES[name], value)
    return config


def real_counts(degrees):
    """Elements and bytes that this rank really holds, stage by stage, and what one gather of everything gives."""
    config = job(**degrees)
    meshes = build_meshes(config.parallelism)
    torch.set_default_dtype(torch.float32)
    settings = model_config("deepseek_v3", "debug", **SIZES)
    counts = []
    for stage in split_model(settings, config.parallelism, meshes.dense.get_local_rank("pp")).values():
        parallelize(stage, meshes)
        stage.to_empty(device="cpu")
        init_parameters(stage, 0)
        local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in stage.parameters())
        gathered = 0
        for module in stage.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        for parameter in stage.parameters():
            gathered += (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        counts.append((local, 4 * gathered, sum(p.numel() for p in stage.parameters())))
    return counts


@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"tp": 2, "ep": 4},
        {"tp": 2, "cp": 2, "ep": 2, "etp": 2},
        {"dpr": 2, "ep": 2},
        {"pp": 2, "tp": 2, "ep": 2},
        {"pp": 2, "vpp": 2, "ep": 4, "schedule": "Interleaved1F1B"},
        {"pp": 2, "vpp": 2, "tp": 2, "schedule": "DualPipeV"},
    ],
    ids=str,
)
def test_counts_are_those_of_real_ranks(run_ranks, degrees):
    real = run_ranks(8, real_counts, degrees)
    for rank in (0, 3, 7):
        report = fake_run(job(**degrees), rank, 8)
        got = [(s.local_parameters, s.gathered_bytes, s.parameters) for s in report.stages]
        assert got == real[rank]
        assert all(stage.shard_bytes == 4 * stage.local_parameters for stage in report.stages)
        assert all(stage.saved_bytes > 0 for stage in report.stages)


def test_the_report_says_where_the_rank_sits_and_what_it_holds():
    report = fake_run(job(pp=2, vpp=2, ep=2, schedule="Interleaved1F1B"), 5, 8)
    assert [(stage.index, stage.parts) for stage in report.stages] == [(1, "tt"), (3, "L")]
    text = str(report)
    assert "pp 2 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 1; here pp 1 x dp_replicate 0 x dp_shard 1" in text
    assert "edp_shard 2 x ep 2 x etp 1; here pp 1 x edp_replicate 0 x edp_shard 0 x ep 1" in text
    assert f"{report.model_parameters:,} parameters; here {report.local_parameters:,}" in text
    assert "gathered, kept" in text and "8 micro-batches" in text


def test_activations_grow_with_the_micro_batch():
    config = job(tp=2)
    small = fake_run(config, 0, 2).stages[0].saved_bytes
    config.training.seq_len *= 2
    config.model.override["max_seq_len"] = 64
    assert 1.9 < fake_run(config, 0, 2).stages[0].saved_bytes / small < 2.6


@pytest.mark.parametrize(
    ("keys", "gradients", "state", "away"),
    [
        ({}, 4, 8, 0),
        ({"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16", "main_grad_dtype": "bfloat16"}, 2, 4, 0),
        ({"name": "Muon", "groups": [{"pattern": "**.weight", "optimizer": "AdamW"}]}, 4, None, 0),
        ({"offload_fraction": 1.0}, 4, 0, 8),
    ],
)
def test_the_optimizer_weighs_what_it_will_store(keys, gradients, state, away):
    config = job(tp=2, ep=2)
    for name, value in keys.items():
        setattr(config.optimizer, name, value)
    report = fake_run(config, 1, 4)
    count = report.local_parameters
    if state is None:
        # Muon keeps one moment of the experts, AdamW two of the rest.
        moe_layers = 4
        experts = moe_layers * 8 * 3 * SIZES["dim"] * SIZES["hidden_dim"] // 4
        state = 4 * (2 * count - experts) / count
    assert report.optimizer == (gradients * count, pytest.approx(state * count), away * count)


def test_rules_are_checked_on_the_whole_model():
    config = job(pp=2)
    config.optimizer.groups = [{"pattern": "lm_head.weight", "lr": 1e-3}]
    fake_run(config, 0, 2)
    config.optimizer.groups = [{"pattern": "lm_haed.weight", "lr": 1e-3}]
    with pytest.raises(ConfigError, match="matches no trainable parameter"):
        fake_run(config, 0, 2)


@pytest.mark.parametrize("section", [{"mode": "full"}, {"mode": "targets", "targets": ["mla_up_proj", "core_attn"]}])
def test_a_micro_batch_keeps_less_with_recompute(section):
    config = job(tp=2)
    plain = fake_run(config, 0, 2).stages[0].saved_bytes
    for name, value in section.items():
        setattr(config.activation_checkpoint, name, value)
    assert fake_run(config, 0, 2).stages[0].saved_bytes < 0.9 * plain


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="RANK = 8: with NGPU = 8 processes ranks are 0 to 7"):
        fake_run(job(), 8, 8)
    with pytest.raises(ConfigError, match="expert_parallel_degree"):
        fake_run(job(ep=3), 0, 8)
    with pytest.raises(ConfigError, match="'always' with pipeline_parallel_degree = 2"):
        config = job(pp=2)
        config.parallelism.fsdp_reshard_after_forward = "always"
        fake_run(config, 0, 8)


@pytest.mark.parametrize("rank", [0, 512, 1023])
def test_deepseek_v3_on_1024_ranks(rank):
    report = fake_run(load_config(["--job.config_file", str(BIG)]), rank, 1024)
    # DeepSeek-V3's published 671B, and 11.5B of the MTP layer.
    assert 670e9 < report.model_parameters < 684e9
    assert len(report.stages) == 4 and report.seconds < 120
    assert 0.4e9 < report.local_parameters < 0.8e9
    # The process has run other tests before: an upper bound of its own share.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20


def test_through_the_front_door():
    environment = os.environ | {"COMM_MODE": "fake_backend", "NGPU": "16", "RANK": "9", "PYTHONPATH": str(ROOT)}
    arguments = ["--model.name", "deepseek_v3", "--training.seq_len", "16", "--training.local_batch_size", "2"]
    arguments += ["--parallelism.tensor_parallel_degree", "2", "--parallelism.expert_parallel_degree", "8"]
    command = [sys.executable, "-m", "titan_moe.cli", "train", *arguments]

    def run(**changed):
        return subprocess.run(command, env=environment | changed, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 9 of 16.*edp_shard 2 x ep 8 x etp 1.*stage +0  EttttL", done.stdout, re.DOTALL)
    assert not (Path.cwd() / "outputs" / "checkpoint").exists()
    refused = run(COMM_MODE="fake")
    assert refused.returncode == 2 and "COMM_MODE = 'fake': expected 'fake_backend'" in refused.stderr
    assert run(RANK="16").returncode == 2
