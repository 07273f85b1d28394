"""The trace's longest path is the predicted step; constants are found again from runs made with other ones."""

import json
from dataclasses import replace

import pytest
from published import FIT_ROWS, V3, prepared

from titan_moe.config import to_toml
from titan_moe.errors import ConfigError
from titan_moe.planner.calibrate import FITTED, Measured, fit
from titan_moe.planner.command import Flags, config_of, main
from titan_moe.planner.predict import predict
from titan_moe.planner.run import Options, plan_of
from titan_moe.planner.systems import system_of


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_the_longest_path_through_the_trace_is_the_step(tmp_path, capsys, schedule):
    file = tmp_path / "step.json"
    words = ["--model", "deepseek_v3_16b", "--gpus", "32", "--pp", "4", "--vpp", "2", "--ep", "8", "--gbs", "256"]
    main([*words, "--schedule", schedule, "--trace", str(file), "--json"], 1)
    result = json.loads(capsys.readouterr().out)
    trace = json.loads(file.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in events:
        assert event.keys() >= {"name", "pid", "tid", "ts", "dur"} and event["dur"] >= 0
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {rank: f"pipeline rank {rank}" for rank in range(4)}
    assert longest_path(events, result["hop_s"] * 1e6) / 1e6 == pytest.approx(result["step_time_s"], rel=1e-9)


def longest_path(events: list[dict], hop: float) -> float:
    """Worked out from durations alone: from what each operation needs, not from when the trace says it starts."""
    passes = [event for event in events if event["cat"] in ("F", "B", "I", "W")]
    tail = max(sum(e["dur"] for e in events if e["tid"] == rank and e not in passes) for rank in range(4))
    last = max(event["args"]["stage"] for event in passes)
    done, free = {}, {}
    for event in sorted(passes, key=lambda event: event["ts"]):
        kind, stage, micro = event["cat"], event["args"]["stage"], event["args"]["micro_batch"]
        needs = ("F", stage - 1, micro) if kind == "F" else ("B", stage + 1, micro)
        ready = free.get(event["tid"], 0.0)
        if kind != "W" and 0 <= needs[1] <= last:
            ready = max(ready, done[needs] + hop)
        end = ready + event["dur"]
        free[event["tid"]] = end
        done["B" if kind == "I" else kind, stage, micro] = end
    return max(free.values()) + tail


def test_a_run_without_a_pipeline_has_a_trace_too(tmp_path, capsys):
    file = tmp_path / "step.json"
    main(["--model", "qwen3_moe_debug", "--gpus", "1", "--gbs", "4", "--trace", str(file), "--json"], 1)
    result = json.loads(capsys.readouterr().out)
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 2 * 4 + 2
    assert max(e["ts"] + e["dur"] for e in events) / 1e6 == pytest.approx(result["step_time_s"])


def test_constants_are_found_again():
    true = replace(system_of("h100"), gemm_bf16=0.5, gemm_fp8=0.35, memory_efficiency=0.6)
    rows = []
    for values in (
        {"precision": "bf16"},
        {"precision": "fp8_block"},
        {"precision": "bf16", "mbs": 2, "tp": 2},
        {"precision": "fp8_block", "mbs": 2, "recompute": ["full"]},
        {"precision": "bf16", "model": "qwen3_moe_30b_a3b", "gpus": 64, "pp": 1, "vpp": 1, "ep": 8, "pp_layout": None},
    ):
        shape, run, _ = prepared(V3 | values)
        rows.append(Measured(shape, run, predict(shape, run, true)["tokens_per_s_per_gpu"]))
    fitted = fit(rows, system_of("h100"))
    for row in rows:
        assert predict(row.shape, row.run, fitted)["tokens_per_s_per_gpu"] == pytest.approx(row.speed, rel=0.02)
    assert fitted.gemm_bf16 == pytest.approx(0.5, rel=0.1)
    assert fitted.gemm_fp8 == pytest.approx(0.35, rel=0.1)


def test_the_published_constants_are_nearly_those_that_a_fit_gives():
    for name, system, values, _, speed in FIT_ROWS:
        shape, run, made = prepared(values, system)
        fitted = fit([Measured(shape, run, speed)], made)
        for constant in FITTED:
            assert getattr(fitted, constant) == pytest.approx(getattr(made, constant), rel=0.05), name


def test_calibrate_reads_runs_and_writes_a_system(tmp_path, capsys):
    flags = Flags(model="qwen3_moe_30b_a3b", gpus=8, ep=8, gbs=64)
    config = config_of(flags)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config))
    options = Options(engine="titan", memory_efficient_permutation=True)
    shape, run = plan_of(config, 8, options, system_of("h100"))
    result = predict(shape, run, system_of("h100"))
    record = {"tps": 8 * 0.8 * result["tokens_per_s_per_gpu"], "tflops": 0.8 * result["tflops_per_gpu"]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i} | record) + "\n" for i in range(1, 20)))
    file = tmp_path / "mine.toml"
    main(["calibrate", "--runs", str(folder), "--system", "h100", "--output", str(file)], 1)
    capsys.readouterr()
    mine = system_of(str(file))
    after = predict(*plan_of(config, 8, options, mine), mine)["tokens_per_s_per_gpu"]
    # The run was 20% slower than predicted; what the fit leaves is what its hold on the old constants costs.
    assert abs(after / (record["tps"] / 8) - 1) < 0.1
    with pytest.raises(ConfigError, match=r"needs config\.toml and metrics\.jsonl"):
        main(["calibrate", "--runs", str(tmp_path), "--system", "h100", "--output", str(file)], 1)
