"""Memory against the report's tables, and against peaks measured on hardware."""

import pytest
from published import TABLE_3, prepared

from titan_moe.models.count import shape_of
from titan_moe.planner.activations import all_bytes, bytes_with, layer_rows
from titan_moe.planner.memory import rank_memory, report_memory, stage_parameters
from titan_moe.planner.rows import routed_rows

MIB = 2**20


def test_a_deepseek_v3_layer_keeps_these_tensors():
    shape, run, _ = prepared(TABLE_3)
    rows = {row["name"]: row["bytes"] / MIB for row in layer_rows(shape, run, False)}
    assert rows == {
        "input": 56,
        "norm": 56,
        "q_down": 12,
        "q_norm": 12,
        "kv_down": 4,
        "kv_norm": 4,
        "q": 192,
        "k": 192,
        "v": 128,
        "attention out": 128,
        "lse": 2,
        "residual": 56,
        "mlp norm": 56,
        "router probs": 2,
        "row map": 8,
        "shared fc1": 32,
        "shared act": 16,
        "permuted input": 448,
        "fc1": 256,
        "act": 128,
        "unpermuted": 448,
    }
    assert sum(rows.values()) == 2236


def test_table_3_under_the_reports_own_rule():
    memory = report_memory(*prepared(TABLE_3)[:2])
    assert memory["weights"] + memory["gradients"] == pytest.approx(36.4, rel=5e-3)
    assert memory["optimizer"] == pytest.approx(32.1, rel=5e-3)
    assert memory["activations"] == pytest.approx(131.0, rel=5e-3)
    assert memory["total"] == pytest.approx(199.5, rel=5e-3)


def test_memory_efficient_permutation_saves_what_the_report_says():
    before = report_memory(*prepared(TABLE_3)[:2])
    after = report_memory(*prepared(TABLE_3 | {"memory_efficient_permutation": True})[:2])
    assert before["activations"] - after["activations"] == pytest.approx(26.3, rel=0.02)


def test_recomputed_up_projections_save_what_table_4_says():
    before = report_memory(*prepared(TABLE_3)[:2])
    after = report_memory(*prepared(TABLE_3 | {"recompute": ["mla_up_proj"]})[:2])
    assert before["activations"] - after["activations"] == pytest.approx(30.4, rel=0.02)


def test_recomputed_activations_save_what_table_4_says_where_they_are_stored_in_fp8():
    shape, run, _ = prepared(TABLE_3 | {"precision": "mxfp8", "recompute": ["moe_act"]}, "gb200")
    saved = bytes_with(layer_rows(shape, run, False), run, "recomputed")
    assert 60 * saved / 2**30 == pytest.approx(3.8, rel=0.03)


def test_every_rank_of_the_real_layout():
    shape, run, _ = prepared(TABLE_3)
    totals = [rank_memory(shape, run, rank)["total"] for rank in range(4)]
    assert totals == pytest.approx([218.6, 217.2, 199.7, 183.6], rel=0.01)


PROXY = {"num_layers": 14, "num_experts": 64, "vocab_size": 258560}
PROXY_H100 = {
    "model": "deepseek_v3_671b",
    "gpus": 64,
    "tp": 2,
    "pp": 4,
    "vpp": 2,
    "ep": 16,
    "gbs": 512,
    "pp_layout": "Et*2|(tt|)*5t|tmL",
}
PROXY_GB200 = {
    "model": "deepseek_v3_671b",
    "gpus": 32,
    "tp": 2,
    "pp": 2,
    "ep": 8,
    "mbs": 4,
    "gbs": 512,
    "pp_layout": "Et*7|t*7mL",
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    ("values", "system", "static", "peak"), [(PROXY_H100, "h100", 31.1, 43.4), (PROXY_GB200, "gb200", 54.5, 94.0)]
)
def test_measured_peaks_of_the_last_rank(values, system, static, peak, lean):
    shape, run, _ = prepared(values | {"memory_efficient_permutation": lean}, system, PROXY)
    memory = rank_memory(shape, run, run.pp - 1)
    assert memory["weights"] + memory["gradients"] + memory["optimizer"] == pytest.approx(static, rel=0.08)
    assert memory["total"] == pytest.approx(peak, rel=0.08)


def test_stages_hold_the_whole_model_and_the_copies_of_the_embedding():
    from titan_moe import models
    from titan_moe.models.count import parameters
    from titan_moe.planner.memory import stage_parameters

    shape, run, _ = prepared(TABLE_3)
    found = [stage_parameters(shape, run, stage) for stage in run.stages]
    whole = parameters(shape_of(models.config("deepseek_v3", "671b", mtp_depth=1)))
    # The MTP layer's stage has a copy of the embedding.
    assert sum(dense + expert * 64 for dense, expert in found) == pytest.approx(whole + 129280 * 7168, rel=1e-12)


@pytest.mark.parametrize(
    "target", ["core_attn", "moe_act", "layernorm", "mla_up_proj", "moe", "shared_experts", "full"]
)
def test_each_recompute_target_removes_its_rows_and_leaves_the_rest(target):
    shape, run, _ = prepared(TABLE_3 | {"recompute": [target]})
    rows = layer_rows(shape, run, False)
    kept, gone = bytes_with(rows, run, "kept"), bytes_with(rows, run, "recomputed")
    assert gone > 0 and kept + gone == all_bytes(rows)
    if target == "full":
        assert kept == 56 * MIB


@pytest.mark.parametrize("target", ["attn_norm", "qkv_linear", "core_attn", "mlp_norm", "expert_fc1", "moe_act"])
def test_each_offload_target_moves_rows_to_the_host(target):
    shape, run, _ = prepared(TABLE_3 | {"offload": [target]})
    assert bytes_with(layer_rows(shape, run, False), run, "offloaded") > 0


def test_an_offloaded_optimizer_and_bf16_moments():
    plain, moved, low = (
        rank_memory(*prepared(TABLE_3 | more)[:2], 1)["optimizer"]
        for more in ({}, {"offload": ["optimizer"]}, {"moments": "bf16"})
    )
    assert moved == 0
    assert low == pytest.approx(plain * 8 / 12)


def test_folding_frees_experts_from_the_dense_layout():
    # Section 3.3.3: TP4 x CP2 x DP8 in each of 4 pipeline stages of 256 GPUs. Bound to DP, experts would be shared by
    # 8 ranks, their matrices cut by TP; folded, 64 ranks share them whole.
    base = {"model": "deepseek_v3_671b", "gpus": 256, "tp": 4, "cp": 2, "pp": 4, "vpp": 4, "gbs": 512}
    shape, bound, _ = prepared(base | {"ep": 8, "etp": 4})
    _, folded, _ = prepared(base | {"ep": 64, "etp": 1})
    assert (bound.dp, bound.edp, folded.dp, folded.edp) == (8, 2, 8, 1)
    stage = bound.stages[5]
    layers = len(stage.layers)
    expert = 3 * 7168 * 2048
    dense = [stage_parameters(shape, run, stage)[0] for run in (bound, folded)]
    assert dense[0] == dense[1]
    assert stage_parameters(shape, bound, stage)[1] == layers * 256 * expert / 32
    assert stage_parameters(shape, folded, stage)[1] == layers * 4 * expert
    # Rows that a rank's experts take: all 4 TP ranks' tokens where each has a quarter of every expert's matrices.
    tokens = 4096 / 2 / 4
    assert (routed_rows(shape, bound), routed_rows(shape, folded)) == (4 * 8 * tokens, 8 * tokens)
