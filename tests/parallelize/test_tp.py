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
