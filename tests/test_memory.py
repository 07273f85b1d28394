"""``titan-moe memory``: what it measures against what is known of the model, and the tables."""

import io

import pytest
from rich.console import Console

from titan_moe import cli
from titan_moe.config import from_dict
from titan_moe.memory import measure, measure_rank, show, show_rank
from titan_moe.models import config as model_config
from titan_moe.observe.memory import total_bytes
from titan_moe.plugins.savings import savings

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = {"dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden_dim": 96}


def job(tmp_path, **sections):
    tree = {
        "job": {"dump_folder": str(tmp_path)},
        "model": {"name": "qwen3_moe", "override": {**MODEL, "max_seq_len": 64}},
        "training": {"seq_len": 64, "local_batch_size": 1, "steps": 2},
    }
    return from_dict(tree | sections)


@pytest.mark.parametrize("real", [False, True])
def test_measures_are_those_of_the_model_and_its_formulas(tmp_path, real):
    report = measure(job(tmp_path), real=real)
    assert report.tokens == 64
    # Two moments, and a step count of 4 bytes for each parameter tensor.
    assert report.gradients == report.parameters
    assert 2 * report.parameters < report.optimizer < 2.01 * report.parameters
    targets = {one.target: one for one in report.recompute}
    assert targets.keys() == {"layernorm", "qk_norm", "core_attn", "moe"}
    for one in targets.values():
        assert one.measured == pytest.approx(one.predicted, rel=0.01), one.target
    # Three of four layers' norms' inputs and fp32 sums.
    assert report.offload["attn_norm"] == 3 * 64 * (64 + 1) * 4
    assert total_bytes(report.peak) > report.kept > 0
    assert report.planned == pytest.approx(report.kept, rel=0.01)


def test_what_the_configuration_switches_on_is_measured(tmp_path):
    plain = measure(job(tmp_path))
    some = {"mode": "targets", "targets": ["layernorm", "core_attn"]}
    saving = measure(job(tmp_path, activation_checkpoint=some))
    by_name = {one.target: one.measured for one in plain.recompute}
    assert plain.kept - saving.kept == by_name["layernorm"] + by_name["core_attn"]
    assert total_bytes(saving.peak) < total_bytes(plain.peak)
    assert saving.planned == pytest.approx(saving.kept, rel=0.01)
    away = measure(job(tmp_path, activation_offload={"targets": ["attn_norm"], "min_bytes": 0}))
    # One element stands for each of three layers' two buffers on the host.
    assert plain.kept - away.kept == plain.offload["attn_norm"] - 3 * 2 * 4


def test_fake_and_real_tensors_agree(tmp_path):
    fake, real = measure(job(tmp_path)), measure(job(tmp_path), real=True)
    assert fake.kept == real.kept and fake.recompute == real.recompute and fake.offload == real.offload


def test_tables_name_the_largest_tensor_and_all_targets(tmp_path):
    report, out = measure(job(tmp_path)), io.StringIO()
    show(report, Console(file=out, width=140))
    text = out.getvalue()
    # What the experts keep: two of eight for each token and a spare row, gate and up of 96.
    assert "layers.*.mlp.experts" in text and f"[{64 * 2 + 1}, {2 * 96}]" in text
    for word in ("layernorm", "qk_norm", "core_attn", "moe", "attn_norm", "expert_fc1", "64 tokens"):
        assert word in text


@pytest.mark.parametrize("degree", ["tensor_parallel_degree", "data_parallel_shard_degree", "expert_parallel_degree"])
def test_the_command_refuses_what_one_process_cannot_run(tmp_path, capsys, monkeypatch, degree):
    monkeypatch.delenv("NGPU", raising=False)
    with pytest.raises(SystemExit) as end:
        cli.main(["memory", "--job.dump_folder", str(tmp_path), f"--parallelism.{degree}", "2"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"parallelism.{degree} = 2" in said and "NGPU=n RANK=r titan-moe memory" in said


V3 = {
    **{"dim": 64, "num_layers": 4, "num_heads": 4, "ffn_dim": 96, "hidden_dim": 48, "shared_hidden_dim": 40},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
    **{"num_experts": 8, "num_groups": 4, "topk_groups": 2, "mtp_depth": 0},
}


# The proportions of DeepSeek-V3: 1/28 of its dims, all of its experts per token.
PROPORTIONED = {
    **{"dim": 256, "num_layers": 4, "num_dense_layers": 1, "ffn_dim": 656, "num_heads": 4, "vocab_size": 264},
    **{"q_lora_rank": 56, "kv_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48},
    **{"hidden_dim": 72, "num_experts": 32, "top_k": 8, "shared_hidden_dim": 72, "mtp_depth": 0, "max_seq_len": 128},
}


@pytest.mark.slow
def test_fine_recompute_saves_the_planners_share_for_few_flops(tmp_path):
    targets, reports = ["layernorm", "moe_act", "mla_up_proj"], []
    for recompute in ({}, {"mode": "targets", "targets": targets}):
        tree = {
            "model": {"name": "deepseek_v3", "override": PROPORTIONED},
            "training": {"seq_len": 70, "local_batch_size": 2, "steps": 2, "mixed_precision_param": "bfloat16"},
        }
        reports.append(measure(job(tmp_path, activation_checkpoint=recompute, **tree)))
    plain, fine = reports
    share = 1 - fine.kept / plain.kept
    assert share == pytest.approx(1 - fine.planned / plain.planned, abs=0.03)
    assert share == pytest.approx(0.35, abs=0.005)
    assert sum(one.flops for one in plain.recompute if one.target in targets) < 0.05 * plain.step_flops


def rank_job(tmp_path, degrees, **sections):
    """Micro-batches of 64 tokens."""
    rows = degrees.get("pipeline_parallel_degree", 1)
    tree = {
        "model": {"name": "deepseek_v3", "override": {**V3, "max_seq_len": 64}},
        "training": {"seq_len": 64, "local_batch_size": rows, "steps": 2},
    }
    return job(tmp_path, parallelism=degrees, **tree, **sections)


@pytest.mark.slow
def test_a_rank_of_a_layout_keeps_its_part(tmp_path):
    # Of two stages the first has two layers, one of them dense.
    layout = {"pipeline_parallel_degree": 2, "pipeline_parallel_layout": "Ett|ttL"}
    report = measure_rank(rank_job(tmp_path, layout), 0, 4)
    assert [stage.parts for stage in report.run.stages] == ["Ett"]
    whole = savings(model_config("deepseek_v3", "debug", **V3), 64, 64, 4)
    for target, layers in {"layernorm": 4, "mla_up_proj": 4, "core_attn": 4, "qk_norm": 4}.items():
        # Two of four layers.
        assert report.recompute[target] == (pytest.approx(whole[target].nbytes * 2 / layers, rel=0.01),), target
    assert report.recompute["mlp"] == (pytest.approx(whole["mlp"].nbytes, rel=0.01),)
    assert report.recompute["shared_expert"] == (pytest.approx(whole["shared_expert"].nbytes / 3, rel=0.01),)
    # Of this stage nothing stays for good; the last layer's are still on their way when the forward pass ends.
    assert report.offload["attn_norm"] == (pytest.approx(64 * (64 + 1) * 4, abs=64),)
    last = measure_rank(rank_job(tmp_path, layout), 2, 4)
    assert [stage.parts for stage in last.run.stages] == ["ttL"] and last.recompute["mlp"] == (0,)


@pytest.mark.slow
def test_a_rank_under_tensor_parallelism_keeps_less_and_its_options_save_less(tmp_path):
    alone = measure_rank(rank_job(tmp_path, {}), 0, 1)
    halved = measure_rank(rank_job(tmp_path, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}), 1, 2)
    # Heads are halved. Of what norms keep, a sequence-parallel rank has half; linears keep the gathered input.
    assert halved.recompute["core_attn"][0] == pytest.approx(alone.recompute["core_attn"][0] / 2, rel=0.01)
    assert 0 < halved.recompute["layernorm"][0] < alone.recompute["layernorm"][0] / 2
    assert halved.plain[0] < 0.75 * alone.plain[0]
    assert halved.run.optimizer.state < 0.75 * alone.run.optimizer.state


def test_a_rank_is_shown_as_configured_beside_each_option_alone(tmp_path):
    some = {"mode": "targets", "targets": ["layernorm", "moe"]}
    config = rank_job(tmp_path, {"expert_parallel_degree": 2}, activation_checkpoint=some)
    report = measure_rank(config, 1, 2)
    together = report.recompute["layernorm"][0] + report.recompute["moe"][0]
    assert report.run.stages[0].saved_bytes == report.plain[0] - together
    out = io.StringIO()
    show_rank(report, Console(file=out, width=160))
    for words in ("rank 1 of 2", "a micro-batch keeps in stage 0", "kept without any", "mla_up_proj", "expert_fc1"):
        assert words in out.getvalue()


def test_the_command_looks_at_the_rank_that_the_environment_names(tmp_path, capsys, monkeypatch):
    argv = ["memory", "--job.dump_folder", str(tmp_path), "--parallelism.expert_parallel_degree", "2"]
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("RANK", "1")
    cli.main([*argv, "--training.seq_len", "32"])
    assert "rank 1 of 2" in capsys.readouterr().out
    for rank, extra, said in (
        ("2", [], "RANK = 2"),
        ("x", [], "RANK = 'x'"),
        ("1", ["--real"], "--real with NGPU = 2"),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            cli.main([*argv, *extra])
        assert end.value.code == 2 and said in capsys.readouterr().err


def test_each_part_of_the_measurement_is_told(tmp_path):
    parts = []
    report = measure(job(tmp_path), on_part=parts.append)
    assert parts[:3] == ["step 1", "step 2", "forward pass"]
    assert {f"recompute of {one.target}" for one in report.recompute} < set(parts)
    assert {f"offload of {target}" for target in report.offload} < set(parts)
