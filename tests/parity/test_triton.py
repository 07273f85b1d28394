"""Every layout of the matrix with the MoE layer on Triton's interpreter: the numbers of one process on torch."""

from dataclasses import replace
from itertools import product

import pytest
import torch.distributed as dist
from fuzzing import check_case
from layout_run import check, run_layout
from layout_table import MATRIX
from model_case import Case

from titan_moe.config.degrees import resolve_degrees
from titan_moe.errors import ConfigError
from titan_moe.kernels.backend import set_backend
from titan_moe.kernels.launch import observed

pytestmark = pytest.mark.slow

ROUTER = {"router_kernel", "router_backward_kernel"}
EXPERTS = {"_route_map_kernel", "_gather_up_kernel", "_rows_kernel", "_down_dgrad_kernel", "_wgrad_kernel"}


def smallest(case: Case) -> Case:
    """One step of the same layout, on the least layers and sequences that it allows."""
    degrees = resolve_degrees(case.parallelism(), case.ranks)
    columns = degrees.dp_replicate * degrees.dp_shard * case.passes
    # Compiled, each rank must hold a layer to compile: as many layers as the case has.
    depths = (4,) if case.compile else (2, 3, 4, 8)
    for layers, rows, seq_len in product(depths, (4, 8, 16), (8, 16)):
        override = {**case.override, "num_layers": layers}
        small = replace(case, override=override, rows=rows, seq_len=min(seq_len, case.seq_len), steps=1)
        try:
            check_case(small)
        except ConfigError:
            continue
        if rows % columns == 0:
            return small
    raise AssertionError(case)


def on_triton(case: Case, file: str) -> tuple[dict[str, float], dict[str, tuple]]:
    """``run_layout``; a rank that holds MoE layers must have launched every kernel of theirs."""
    launched, before = set(), set_backend("triton")
    try:
        with observed(lambda kernel, *_: launched.add(kernel.__name__)):
            errors, bits = run_layout(case, file)
    finally:
        set_backend(before)
    want = ROUTER | EXPERTS if any(".router." in name for name in bits) else set()
    if case.override.get("dispatcher") == "hybridep":
        want = want - {"_route_map_kernel"}  # its package orders the rows
    if case.seq_len == 1 and dist.get_rank() > 0:
        want = set()  # the first tp rank has the token
    assert launched >= want, want - launched
    return errors, bits


@pytest.mark.parametrize("name", MATRIX)
def test_layout_on_triton_equals_one_process_on_torch(run_ranks, references, name):
    check(smallest(MATRIX[name]), run_ranks, references, timeout=900, run=on_triton)
