"""Layers over ranks on Triton against one process in float64."""

import moe_parity
import pytest
from interpreter import backend
from moe_parity import DISPATCHERS, assert_same
from test_dispatchers import CASES, PER_RANK

pytestmark = pytest.mark.slow


def differences(*args):
    with backend("triton"):
        return moe_parity.differences(*args)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("name", ["sigmoid_bias_groups_shared", "gpt_oss", "input_weight_top2_bias", "five_experts"])
def test_layer_over_ranks_on_triton_equals_one_process(run_ranks, name, dispatcher):
    assert_same(run_ranks(2, differences, dispatcher, CASES[name], [5, 3], {"batch": 2}, timeout=300))


@pytest.mark.parametrize("name", ["capacity_probs", "counts_padded", "expert_choice"])
def test_capacity_over_ranks_on_triton(run_ranks, name):
    assert_same(run_ranks(2, differences, "alltoall", PER_RANK[name], [5, 3], {"whole": False}, timeout=300))


def test_experts_split_over_ranks_on_triton(run_ranks):
    assert_same(run_ranks(4, differences, "alltoall", CASES["gpt_oss"], [5, 3, 4, 6], {"etp": 2}, timeout=300))
