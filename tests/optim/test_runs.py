"""Whole training runs with each optimizer: they learn, stop and resume bit for bit."""

import json

import pytest

from titan_moe import trainer as trainer_module
from titan_moe.config import from_dict
from titan_moe.observe import TIMING_KEYS
from titan_moe.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "hidden_dim": 16}
OPTIMIZERS = {
    "lean_adamw": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float8", "stochastic_rounding": True},
    "muon_clip": {
        "name": "Muon",
        "qk_clip_threshold": 0.05,
        "groups": [{"pattern": "**.q_proj.weight", "row_blocks": [16]}, {"pattern": "**.router.*", "lr": 1e-3}],
    },
    "away": {"offload_fraction": 1.0, "cpu_step_fraction": 0.5},
    "remainders": {"store_param_remainders": True, "exp_avg_dtype": "bfloat16", "main_grad_dtype": "float32"},
    "muon_masters_away": {"name": "Muon", "master_dtype": "float32", "offload_fraction": 1.0},
}


def config(corpus, out, kind, steps=6):
    low = any(key in OPTIMIZERS[kind] for key in ("store_param_remainders", "master_dtype"))
    return from_dict(
        {
            "job": {"dump_folder": str(out)},
            "model": {"name": "mixtral", "override": {**SIZES, "num_experts": 4, "max_seq_len": 64}},
            "training": {
                "dataset": "text",
                "dataset_path": str(corpus),
                "seq_len": 32,
                "local_batch_size": 2,
                "global_batch_size": 4,
                "steps": steps,
                "num_workers": 0,
                "dtype": "bfloat16" if low else "float32",
            },
            "optimizer": {"lr": 1e-2} | OPTIMIZERS[kind],
            "lr_scheduler": {"warmup_steps": 2},
            "metrics": {"enable_tensorboard": False},
            "checkpoint": {"enable": True, "interval": 2},
        }
    )


def steps_of(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMING_KEYS} for line in lines]


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_learns_and_a_killed_one_resumes_bitwise(kind, corpus, tmp_path, monkeypatch):
    train(config(corpus, tmp_path / "whole", kind))
    whole = steps_of(tmp_path / "whole")
    assert whole[-1]["loss"] < whole[0]["loss"]
    original = trainer_module.Trainer.step

    def step(self, batches):
        if self.step_done == 5:
            raise Killed
        original(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "step", step)
        with pytest.raises(Killed):
            train(config(corpus, tmp_path / "parts", kind))
    train(config(corpus, tmp_path / "parts", kind))
    assert steps_of(tmp_path / "parts") == whole
