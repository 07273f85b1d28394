"""The command: keys of its JSON, speed of its start, refusals in the trainer's words, a TOML of a run."""

import json
import subprocess
import sys

import pytest
from published import GB200_LAYOUT

from titan_moe.cli import main
from titan_moe.errors import ConfigError
from titan_moe.planner.command import main as plan

V3 = ["--model", "deepseek_v3_671b", "--system", "gb200", "--gpus", "256", "--pp", "4", "--vpp", "4", "--ep", "64"]
V3 += ["--gbs", "8192", "--pp-layout", GB200_LAYOUT]


def answer(capsys, *words: str) -> dict:
    plan([*words, "--json"], 1)
    return json.loads(capsys.readouterr().out)


def test_json_has_the_promised_keys(capsys):
    found = answer(capsys, *V3)
    for key in (
        "params_total params_active flops_per_token memory_gib rank fits step_time_s tflops_per_gpu "
        "tokens_per_s_per_gpu bubble_fraction a2a_us"
    ).split():
        assert key in found
    assert set(found["memory_gib"]) == {"weights", "gradients", "optimizer", "activations", "buffers", "total"}
    assert set(found["a2a_us"]) == {"dispatch", "combine"}
    assert found["rank"] == 0 and found["fits"] is False
    assert found["memory_gib"]["total"] == pytest.approx(218.6, rel=0.01)


def test_every_option_is_taken(capsys):
    words = [*V3, "--tp", "1", "--cp", "1", "--etp", "1", "--mbs", "1", "--seq", "4096", "--precision", "mxfp8"]
    words += ["--recompute", "mlp,layernorm", "--offload", "optimizer,expert_fc1", "--dispatcher", "hybridep"]
    words += ["--ep-overlap", "--cuda-graph", "--rank-rule", "report", "--release", "0.16"]
    found = answer(capsys, *words)
    assert found["memory_gib"]["optimizer"] == 0
    without = answer(capsys, *(word for word in V3 if word not in ("--pp-layout", GB200_LAYOUT)), "--no-mtp")
    assert without["params_total"] == pytest.approx(671.03e9, rel=1e-4)


def test_running_the_up_projection_again_costs_its_flops(capsys):
    words = [
        "--model",
        "qwen3_moe_30b_a3b",
        "--system",
        "h100",
        "--gpus",
        "8",
        "--ep",
        "8",
        "--seq",
        "4096",
        "--gbs",
        "64",
    ]
    kept, again = answer(capsys, *words), answer(capsys, *words, "--moe-save", "input")
    # 48 layers, 8 experts a token, gate and up from 2048 to 768 each; 64 x 4096 tokens on 8 GPUs of 989 TFLOPS.
    least = 48 * 8 * 2 * 2048 * 2 * 768 * 64 * 4096 / 8 / 989e12
    assert least < again["step_time_s"] - kept["step_time_s"] < 2.5 * least
    assert again["memory_gib"]["activations"] < kept["memory_gib"]["activations"]


def test_more_imbalance_than_the_bound_on_rows_is_refused(capsys):
    words = [*V3, "--recv-capacity-factor", "1.2"]
    answer(capsys, *words, "--imbalance", "1.2")
    with pytest.raises(ConfigError, match=r"--imbalance 1\.3 is beyond moe\.recv_capacity_factor = 1\.2"):
        answer(capsys, *words, "--imbalance", "1.3")


def test_the_reports_rank_rule(capsys):
    memory = answer(capsys, *V3, "--rank-rule", "report")["memory_gib"]
    assert memory["activations"] == pytest.approx(131.0, rel=5e-3)
    assert memory["total"] == pytest.approx(199.5, rel=5e-3)


def test_the_command_loads_no_torch():
    program = (
        "import sys; from titan_moe.cli import main\n"
        f"main(['plan', *{V3!r}, '--json'])\n"
        "assert 'torch' not in sys.modules and 'tyro' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "deepseek_v3_67b", "--gpus", "8"], "Did you mean 'deepseek_v3_671b'"),
        (["--model", "deepseek_v3_671b", "--gpus", "8", "--system", "h1000"], "Did you mean 'h100'"),
        (["--model", "deepseek_v3_671b", "--gpus", "8", "--release", "0.99"], "unknown release of h100"),
        (["--model", "deepseek_v3_671b", "--gpus", "1024", "--pp", "3"], "does not divide the 1024 processes"),
        (["--model", "deepseek_v3_671b", "--gpus", "64", "--tp", "128"], "does not divide the 64"),
        (["--model", "deepseek_v3_671b", "--gpus", "48", "--ep", "32"], "expert layout ep 32 x etp 1"),
        (["--model", "qwen3_moe_235b_a22b", "--gpus", "64", "--tp", "8"], "does not divide the model's num_kv_heads"),
        (["--model", "deepseek_v3_671b", "--gpus", "64", "--pp", "8", "--pp-layout", "Et|L"], "has 2 stages"),
        (["--model", "deepseek_v3_671b", "--gpus", "64", "--pp", "8", "--schedule", "1F2B"], "unknown"),
        (["--model", "deepseek_v3_671b", "--gpus", "64", "--pp", "8", "--gbs", "12"], "does not divide"),
        (["--model", "deepseek_v3_671b", "--gpus", "8", "--recompute", "mla"], "unknown target"),
        (["--model", "qwen3_moe_debug", "--gpus", "8", "--recompute", "mla_up_proj"], "no latent attention"),
        (["--model", "deepseek_v3_671b", "--gpus", "8", "--system", "a100", "--precision", "mxfp8"], "no such"),
        (["--model", "deepseek_v3_671b", "--gpus", "8", "--precision", "fp8"], "expected one of"),
        (["--model", "deepseek_v3_671b", "--gpus", "8", "--lengths", "12,x"], "whole numbers"),
        (["--gpus", "8"], "--model is missing"),
        (["--model", "deepseek_v3_671b"], "--gpus is missing"),
        (["--model", "deepseek_v3_671b", "--gpus", "8", "--training.steps", "3"], "needs --config"),
        (["--config", "train_configs/debug.toml", "--tp", "2"], "--tp with --config"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, says):
    with pytest.raises(ConfigError, match=says) as refused:
        plan(words, 1)
    assert "\n" not in str(refused.value)


def test_a_run_that_does_not_fit_says_by_how_much_where_and_the_cheapest_way_out(capsys):
    plan(V3, 1)
    text = " ".join(capsys.readouterr().out.split())
    assert "does not fit: pipeline rank 0 needs 218.8 GiB, 42.3 more than 176.4" in text
    assert "cheapest way to fit: --" in text
    way = text.split("cheapest way to fit: ")[1].split(" (")[0]
    fixed = answer(capsys, *V3, *way.split())
    assert fixed["fits"]


def test_the_terminal_lists_ranks_tensors_and_components(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plan([*V3, "--tensors"], 1)
    text = capsys.readouterr().out
    for word in ("682.64 B parameters", "GiB per pipeline rank", "unpermuted", "all-to-all", "bubble"):
        assert word in text


def test_a_configuration_of_the_trainer(capsys):
    found = answer(capsys, "--config", "train_configs/deepseek_v3_671b_h100.toml", "--gpus", "1024")
    assert found["params_total"] == pytest.approx(682.64e9, rel=1e-4)
    assert len(found["ranks"]) == 8
    changed = answer(
        capsys,
        *("--config", "train_configs/deepseek_v3_671b_h100.toml", "--gpus", "1024"),
        *("--activation_checkpoint.mode", "full"),
    )
    assert changed["memory_gib"]["activations"] < 0.2 * found["memory_gib"]["activations"]


def test_a_system_of_ones_own(tmp_path, capsys):
    own = tmp_path / "mine.toml"
    own.write_text('[mine]\nlike = "h100"\nrelease = "mine"\nmemory_gib = 1000\n')
    words = [word if word != "gb200" else str(own) for word in V3]
    assert answer(capsys, *words)["limit_gib"] == pytest.approx(1000 * 0.97 - 3)
    own.write_text('[mine]\nlike = "h100"\nmemory = 1000\n')
    with pytest.raises(ConfigError, match=r"unknown key mine.memory"):
        plan(words, 1)
    own.write_text("[mine]\nmemory_gib = 80\n")
    with pytest.raises(ConfigError, match=r"lacks .* or name a built-in with 'like'"):
        plan(words, 1)


def test_help_names_the_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    assert "--rank" in capsys.readouterr().out
