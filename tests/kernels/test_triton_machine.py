"""What only a process of its own can show: offsets past 2^31, and the machine code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from overflow import CASES

from titan_moe.errors import ConfigError
from titan_moe.kernels.backend import set_backend

ROOT = Path(__file__).parents[2]


def run(*command, **environment):
    known = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command], env={**known, **environment}, cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fault_32_offsets_past_2_to_the_31(case):
    done = run("tests/kernels/overflow.py", case, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_audit_finds_no_broken_gate():
    done = run("-m", "titan_moe.kernels.audit")
    assert done.returncode == 0 and ", 0 broken" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    for arch in ("sm_80", "sm_90", "sm_100"):
        # The first kernel of a layer, and the optimizer's.
        assert f"{arch:6} router " in done.stdout and f"{arch:6} adamw " in done.stdout


def test_audit_refuses_to_interpret():
    done = run("-m", "titan_moe.kernels.audit", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "Unset it" in done.stderr


def test_triton_is_refused_on_a_cpu_without_the_interpreter():
    program = "from titan_moe.kernels.backend import set_backend; set_backend('triton', 'cpu')"
    done = run("-c", program)
    assert done.returncode == 1 and "ConfigError: kernels.backend = 'triton' on a cpu device" in done.stderr


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(ConfigError, match=r"kernels.backend = 'tritan' is not known. Did you mean 'triton'\?"):
        set_backend("tritan")
