"""``titan-moe memory``: what it measures against what is known of the model, and the tables."""

import io

import pytest
from rich.console import Console

from titan_moe import cli
from titan_moe.config import from_dict
from titan_moe.memory import measure, show
from titan_moe.observe.memory import total_bytes

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
def test_the_command_refuses_what_one_process_cannot_run(tmp_path, capsys, degree):
    with pytest.raises(SystemExit) as end:
        cli.main(["memory", "--job.dump_folder", str(tmp_path), f"--parallelism.{degree}", "2"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"parallelism.{degree} = 2" in said and "COMM_MODE=fake_backend" in said


def test_each_part_of_the_measurement_is_told(tmp_path):
    parts = []
    report = measure(job(tmp_path), on_part=parts.append)
    assert parts[:3] == ["step 1", "step 2", "forward pass"]
    assert {f"recompute of {one.target}" for one in report.recompute} < set(parts)
    assert {f"offload of {target}" for target in report.offload} < set(parts)
