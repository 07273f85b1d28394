"""Whole models over layouts with the MoE layer on Triton's interpreter: the numbers of one process on torch."""

import layout_run
import pytest
from layout_table import MATRIX

from titan_moe.kernels.backend import set_backend

pytestmark = pytest.mark.slow

LAYOUTS = ["tp2 ep8 [deepseek_v3]", "pp4 1f1b [deepseek_v3]", "accumulation hsdp ep [qwen3_moe]"]
on_torch = layout_run.run_layout


def on_triton(*args):
    before = set_backend("triton")
    try:
        return on_torch(*args)
    finally:
        set_backend(before)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_on_triton_equals_one_process_on_torch(run_ranks, references, monkeypatch, name):
    monkeypatch.setattr(layout_run, "run_layout", on_triton)
    layout_run.check(MATRIX[name], run_ranks, references, timeout=900)
