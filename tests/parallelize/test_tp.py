"""Tensor parallelism: loss and every rank's part of every gradient as one process's, in float64."""

import pytest
from layouts import TINY, compare

TP2 = {"tensor_parallel_degree": 2}
TP4 = {"tensor_parallel_degree": 4}


def assert_equal_to_one_process(results):
    for rank, (loss_error, gradient_error, name) in enumerate(results):
        assert loss_error < 1e-12, (rank, loss_error)
        assert gradient_error < 1e-10, (rank, name, gradient_error)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", TINY)
def test_every_family_on_two_tp_ranks(run_ranks, family, sequence_parallel):
    assert_equal_to_one_process(run_ranks(2, compare, family, TP2, 2, 6, sequence_parallel))


LAYOUTS = {
    "tp4": (4, TP4, 2, 8),
    "tp2_dp2": (4, {**TP2, "data_parallel_shard_degree": 2}, 4, 6),
    "tp2_ep2": (2, {**TP2, "expert_parallel_degree": 2}, 2, 6),
    "tp2_ep4_dp2": (4, {**TP2, "expert_parallel_degree": 4}, 4, 6),
    "tp2_ep2_etp2_dp2": (4, {**TP2, "expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2}, 4, 6),
    "etp2": (2, {"expert_tensor_parallel_degree": 2}, 2, 6),
    "tp2_etp2": (2, {**TP2, "expert_tensor_parallel_degree": 2}, 2, 6),
    "tp4_dp2": (8, {**TP4, "expert_parallel_degree": 2}, 2, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_layouts(run_ranks, family, layout):
    ranks, degrees, rows, seq_len = LAYOUTS[layout]
    assert_equal_to_one_process(run_ranks(ranks, compare, family, degrees, rows, seq_len))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("seq_len", [1, 3, 5, 9])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fault_14_sequences_that_tp_does_not_divide(run_ranks, family, seq_len, sequence_parallel):
    results = run_ranks(4, compare, family, TP4, 1, seq_len, sequence_parallel)
    assert_equal_to_one_process(results)
