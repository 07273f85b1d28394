"""Dispatchers over ranks against one process in float64."""

import pytest
from moe_parity import DISPATCHERS, assert_same, differences

CASES = {
    "plain": {},
    "sigmoid_bias_groups_shared": {
        "score_function": "sigmoid",
        "expert_bias": True,
        "num_groups": 4,
        "topk_groups": 2,
        "route_scale": 2.5,
        "shared_hidden_dim": 7,
    },
    "all_losses": {
        "aux_loss_coef": 0.1,
        "seq_aux_loss_coef": 0.2,
        "global_aux_loss_coef": 0.3,
        "z_loss_coef": 0.4,
        "top_k": 3,
    },
    "gpt_oss": {
        "router_bias": True,
        "activation": "clamped_swiglu",
        "activation_limit": 0.4,
        "expert_linear_bias": True,
    },
    "input_weight_top2_bias": {"weight_on": "input", "expert_linear_bias": True, "activation": "geglu"},
    "relu2_top1": {"top_k": 1, "normalize_weights": False, "activation": "relu2"},
    "all_experts": {"top_k": 8},
    "latent": {"latent_dim": 4, "shared_hidden_dim": 5, "shared_gate": True},
    "sequential": {"experts": "sequential", "expert_linear_bias": True},
    "five_experts": {"num_experts": 5, "expert_linear_bias": True},
    "thirteen_experts": {"num_experts": 13, "top_k": 4},
}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_layer_over_ranks_equals_one_process(run_ranks, name, ranks, dispatcher):
    sizes = [5, 3, 4, 6][:ranks]
    assert_same(run_ranks(ranks, differences, dispatcher, CASES[name], sizes, 1, 2))
