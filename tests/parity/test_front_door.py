"""The program that a user starts, under several layouts: every number it writes is that of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 5

LAYOUTS = {
    "dp": {},
    "hsdp, ep over replicas": {
        "data_parallel_replicate_degree": 4,
        "expert_parallel_degree": 4,
        "moe.dispatcher": "alltoall",
    },
    "tp, ep": {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
    "cp, ep by all-gather": {
        "context_parallel_degree": 4,
        "expert_parallel_degree": 8,
        "moe.dispatcher": "allgather",
    },
    "pp, vpp, tp": {
        "pipeline_parallel_degree": 2,
        "virtual_pipeline_degree": 2,
        "pipeline_parallel_schedule": "InterleavedZeroBubble",
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 2,
    },
    "tp, ep, etp, cp by all-to-all": {
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 2,
        "context_parallel_method": "alltoall",
        "expert_parallel_degree": 2,
        "expert_tensor_parallel_degree": 2,
    },
}


def trained(processes: int, folder: Path, keys: dict[str, str | int]) -> list[dict]:
    """The records of every step that ``run_train.sh`` writes."""
    command = ["./run_train.sh", "--job.config_file", "train_configs/parity.toml", "--training.dtype", "float64"]
    command += ["--job.dump_folder", str(folder), "--training.steps", str(STEPS)]
    # A loaded machine takes its time between collectives.
    command += ["--comm.train_timeout_seconds", "300"]
    for key, value in keys.items():
        command += [f"--{key}" if "." in key else f"--parallelism.{key}", str(value)]
    own = {"NGPU": str(processes), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss" in record]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    return trained(1, tmp_path_factory.mktemp("alone"), {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_processes_write_the_numbers_of_one(alone, tmp_path, name):
    many = trained(8, tmp_path, LAYOUTS[name])
    assert len(alone) == len(many) == STEPS
    assert [record["step"] for record in many] == [record["step"] for record in alone]
    assert many[0]["loss"] > many[-1]["loss"]
    for key in ("loss", "mtp_loss", "grad_norm"):
        assert [record[key] for record in many] == pytest.approx([record[key] for record in alone], rel=1e-10), key
    for one, other in zip(alone, many, strict=True):
        assert [layer["load"] for layer in other["moe"]] == [layer["load"] for layer in one["moe"]]
