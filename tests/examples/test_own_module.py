"""The example runs as its first lines say, and finds the gradients of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def test_the_plain_model_knows_nothing_of_titan_moe():
    assert "titan_moe" not in (ROOT / "examples" / "plain_transformer.py").read_text()


@pytest.mark.slow
def test_own_and_transformers_models_have_the_gradients_of_one_process():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*command, "examples/own_module.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [line for line in finished.stdout.splitlines() if "allowed" in line]
    assert [line.rpartition(" ")[2] for line in lines] == ["1e-10", "1e-05", "1e-10"]
