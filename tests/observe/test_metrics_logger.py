import io
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_moe.config import JobConfig
from titan_moe.errors import ConfigError, DataError, TrainingError
from titan_moe.moe import MoE, MoEConfig, finish_step
from titan_moe.observe import TIMING_KEYS, MetricsLogger
from titan_moe.observe.metrics import moe_records


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def job(folder: Path, **metrics) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.metrics.enable_tensorboard = False
    for key, value in metrics.items():
        setattr(config.metrics, key, value)
    return config


def logger(folder: Path, **kwargs) -> MetricsLogger:
    return MetricsLogger(kwargs.pop("config", job(folder)), **{"total_steps": 100, "file": io.StringIO()} | kwargs)


def step(number: int) -> dict[str, float]:
    return {"loss": 1 / (number + 2), "grad_norm": 0.1 + number, "lr": 1e-3 / 3, "tokens": 512 * number}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def counters(counts: list[list[int]], experts: list[int] | None = None, **extra) -> dict:
    counts_LE = torch.tensor(counts)
    layers = len(counts)
    zeros = torch.zeros(layers)
    return {
        "names": [f"layers.{i}.mlp" for i in range(layers)],
        "counts_LE": counts_LE,
        "dropped_L": torch.zeros(layers, dtype=torch.int64),
        "routed_L": counts_LE.sum(1),
        "aux_loss_L": zeros,
        "z_loss_L": zeros,
        "bias_min_L": zeros,
        "bias_max_L": zeros,
        "num_experts_L": torch.tensor(experts or [len(counts[0])] * layers),
    } | extra


def test_a_line_holds_every_number_in_full_precision(tmp_path):
    clock = Clock()
    # 3e9 FLOP per token at 256 tokens per second over two devices.
    with logger(tmp_path, clock=clock, flops_per_token=3e9, num_devices=2) as log:
        clock.now = 2.0
        log.log_step(1, step(1) | {"mtp_loss": 0.1 + 0.2, "data_wait_s": 0.25, "skipped": 0})
    (line,) = lines(tmp_path)
    memory = line.pop("memory_gib")
    assert line == {
        "step": 1,
        "loss": 1 / 3,
        "grad_norm": 1.1,
        "lr": 1e-3 / 3,
        "tokens": 512,
        "mtp_loss": 0.30000000000000004,
        "skipped": 0,
        "tps": 256.0,
        "tflops": 0.384,
        "mfu": None,
        "data_wait_s": 0.25,
    }
    # A process that has imported torch holds more than 50 MiB and less than 100 GiB.
    assert 0.05 < memory < 100
    assert "0.30000000000000004" in (tmp_path / "metrics.jsonl").read_text()


def test_mfu_is_the_share_of_the_devices_peak(tmp_path):
    clock = Clock()
    with logger(tmp_path, clock=clock, flops_per_token=1e9) as log:
        log.peak_flops = 4e12
        clock.now = 1.0
        log.log_step(1, step(1) | {"tokens": 1000})
    assert lines(tmp_path)[0]["tflops"] == 1.0
    assert lines(tmp_path)[0]["mfu"] == 25.0


def test_zero_dimensional_tensors_are_written_as_numbers(tmp_path):
    with logger(tmp_path) as log:
        log.log_step(1, step(1) | {"loss": torch.tensor(0.1, dtype=torch.float64), "tokens": torch.tensor(7)})
    assert (lines(tmp_path)[0]["loss"], lines(tmp_path)[0]["tokens"]) == (0.1, 7)


def test_throughput_leaves_untimed_work_and_earlier_tokens_out(tmp_path):
    clock = Clock()
    with logger(tmp_path, clock=clock, resume_step=1, start_tokens=512) as log:
        clock.now = 4.0
        log.log_step(2, step(2))
        with log.untimed():
            clock.now += 100.0
        clock.now += 2.0
        log.log_step(3, step(3))
    assert [line["tps"] for line in lines(tmp_path)] == [128.0, 256.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_becomes_null_and_is_flagged(tmp_path, value):
    with logger(tmp_path) as log:
        log.log_step(1, step(1) | {"loss": value})
        log.log_step(2, step(2))
    first, second = lines(tmp_path)
    assert first["loss"] is None and first["nonfinite"] is True
    assert "nonfinite" not in second


def test_every_line_is_on_disk_before_the_next_step(tmp_path):
    log = logger(tmp_path)
    log.log_step(1, step(1))
    assert [line["step"] for line in lines(tmp_path)] == [1]
    log.log_validation(1, {"val_loss": 1.5, "val_loss_per_byte": 0.5, "val_tokens": 100})
    assert lines(tmp_path)[1] == {"step": 1, "val_loss": 1.5, "val_loss_per_byte": 0.5, "val_tokens": 100}
    log.close()


def test_only_rank_zero_writes(tmp_path):
    with logger(tmp_path / "run", rank=1) as log, log.untimed():
        log.message("hello")
        log.log_step(1, step(1))
        log.log_validation(1, {"val_loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_the_share_of_memory_is_of_the_ram_that_the_log_names(tmp_path):
    file = io.StringIO()
    with logger(tmp_path, file=file) as log:
        log.explain_memory()
        log.log_step(1, step(1))
    first, second = file.getvalue().splitlines()
    ram = float(re.search(r"of this machine's ([\d.]+) GiB of RAM$", first)[1])
    used, share = map(float, re.search(r"memory: +([\d.]+)GiB\(([\d.]+)%\)", second).groups())
    total_kib = int(re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())[1])
    assert ram == pytest.approx(total_kib / 2**20, abs=0.01)
    assert share == pytest.approx(100 * used / ram, abs=100 * 0.01 / ram)


def test_moe_figures_by_hand():
    moe = counters(
        [[6, 0, 2, 0], [5, 5, 0, 0]],
        experts=[4, 2],
        dropped_L=torch.tensor([2, 0]),
        routed_L=torch.tensor([8, 10]),
        aux_loss_L=torch.tensor([0.5, 0.25]),
        z_loss_L=torch.tensor([0.125, float("inf")]),
        bias_min_L=torch.tensor([-0.5, float("nan")]),
        bias_max_L=torch.tensor([0.5, float("nan")]),
    )
    # Layer 0: mean 2, so 6 / 2. Layer 1 has two experts only; its padding is neither dead nor in the mean.
    assert moe_records(moe) == [
        {
            "layer": "layers.0.mlp",
            "max_over_mean": 3.0,
            "dead_experts": 2,
            "dropped": 0.25,
            "aux_loss": 0.5,
            "z_loss": 0.125,
            "bias_min": -0.5,
            "bias_max": 0.5,
            "load": [6, 0, 2, 0],
        },
        {
            "layer": "layers.1.mlp",
            "max_over_mean": 1.0,
            "dead_experts": 0,
            "dropped": 0.0,
            "aux_loss": 0.25,
            "z_loss": None,
            "bias_min": None,
            "bias_max": None,
            "load": [5, 5],
        },
    ]


def test_moe_figures_of_a_layer_without_tokens():
    (record,) = moe_records(counters([[0, 0, 0]]))
    assert (record["max_over_mean"], record["dead_experts"], record["dropped"]) == (0.0, 3, 0.0)


def test_the_counters_of_real_layers_are_understood():
    torch.manual_seed(0)
    layers = torch.nn.ModuleDict(
        {
            "a": MoE(MoEConfig(8, 4, 4, 2, expert_bias=True, capacity_factor=0.5)),
            "b": MoE(MoEConfig(8, 4, 2, 1, normalize_weights=False, aux_loss_coef=0.5, z_loss_coef=0.5)),
        }
    )
    with torch.no_grad():
        for moe in layers.values():
            # Every token takes the first experts.
            moe.router.weight.zero_()
            moe(torch.randn(2, 8, 8))
    a, b = moe_records(finish_step(layers))
    # 16 tokens; capacity ceil(16 * 2 / 4 * 0.5) = 4 leaves 2 * 4 of 32 slots. The bias moves away from 16 and 0.
    assert (a["load"], a["max_over_mean"], a["dead_experts"], a["dropped"]) == ([16, 16, 0, 0], 2.0, 2, 0.75)
    assert (a["bias_min"], a["bias_max"]) == pytest.approx((-1e-3, 1e-3))
    # The aux loss of a uniform router is its coefficient.
    assert (b["load"], b["dead_experts"], b["dropped"]) == ([16, 0], 1, 0.0)
    assert b["aux_loss"] == pytest.approx(0.5)
    # Two logits of 0: log(2) squared.
    assert (a["z_loss"], b["z_loss"]) == (0.0, pytest.approx(0.5 * math.log(2) ** 2))


def test_a_dense_model_has_no_layers_to_report(tmp_path):
    with logger(tmp_path) as log:
        log.log_step(1, step(1), finish_step(torch.nn.Linear(2, 2)))
        log.log_step(2, step(2), None)
    assert [line.get("moe") for line in lines(tmp_path)] == [[], None]


def test_large_models_record_each_experts_load_on_printed_steps_only(tmp_path):
    config = job(tmp_path, log_freq=3)
    with logger(tmp_path, config=config, total_steps=5) as log:
        for number in range(1, 6):
            log.log_step(number, step(number), counters([[1] * 4097]))
    assert [line["step"] for line in lines(tmp_path) if "load" in line["moe"][0]] == [1, 3, 5]
    assert all(line["moe"][0]["max_over_mean"] == 1.0 for line in lines(tmp_path))


def write_run(folder: Path, first: int, last: int, **kwargs) -> str:
    out = io.StringIO()
    with logger(folder, file=out, **kwargs) as log:
        for number in range(first, last + 1):
            log.log_step(number, step(number), counters([[number, 1]]))
            if number % 2 == 0:
                log.log_validation(number, {"val_loss": 1.0 / number})
    return out.getvalue()


def exact(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMING_KEYS} for line in lines(folder)]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    write_run(tmp_path / "whole", 1, 9)
    write_run(tmp_path / "killed", 1, 7)
    write_run(tmp_path / "killed", 5, 9, resume_step=4)
    assert exact(tmp_path / "killed") == exact(tmp_path / "whole")
    assert len(lines(tmp_path / "killed")) == 9 + 4
    assert not list((tmp_path / "killed").glob("*.tmp"))


@pytest.mark.parametrize("torn", ['{"step": 5, "lo', '{"step": 5, "loss": 1.0}', '{"step"', "\n"])
def test_resume_drops_a_torn_last_line(tmp_path, torn):
    write_run(tmp_path, 1, 4)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    write_run(tmp_path, 6, 6, resume_step=5)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 2, 3, 4, 4, 6, 6]


def test_resume_keeps_earlier_lines_byte_for_byte(tmp_path):
    write_run(tmp_path, 1, 6)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write_run(tmp_path, 7, 6, resume_step=6)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_names_a_broken_line_in_the_middle(tmp_path):
    write_run(tmp_path, 1, 4)
    path = tmp_path / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows[:2], "garbage\n", *rows[2:]]))
    with pytest.raises(DataError, match=r"metrics.jsonl, line 3: not a metrics object"):
        logger(tmp_path, resume_step=4)
    assert "garbage" in path.read_text()


def test_a_fresh_start_moves_older_metrics_aside(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        with logger(tmp_path) as log:
            log.log_step(1, step(1) | {"loss": loss})
    read = [json.loads((tmp_path / name).read_text())["loss"] for name in ("metrics.1.jsonl", "metrics.2.jsonl")]
    assert read == [1.0, 2.0]
    assert lines(tmp_path)[0]["loss"] == 3.0


def test_an_empty_older_file_is_reused(tmp_path):
    logger(tmp_path).close()
    logger(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "metrics.jsonl"]


def test_a_file_in_the_place_of_the_folder_is_one_readable_error(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"job.dump_folder = '.*taken'.*Choose another folder") as error:
        logger(tmp_path / "taken")
    assert "\n" not in str(error.value)


def test_a_full_disk_stops_training_with_the_step_and_the_way_out(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"step 1: .*metrics.jsonl cannot be written \(No space left"):
        with logger(tmp_path) as log:
            log.log_step(1, step(1))


def test_wandb_gets_the_configuration_and_the_scalars(tmp_path, monkeypatch):
    logged, started = [], []
    run = SimpleNamespace(log=lambda scalars, step: logged.append((step, scalars)), finish=lambda: logged.append("end"))
    fake = SimpleNamespace(init=lambda **kwargs: started.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with logger(tmp_path, config=job(tmp_path, enable_wandb=True)) as log:
        log.log_step(1, step(1), counters([[3, 1]]))
        log.log_validation(1, {"val_loss": 4.0})
    assert started[0]["config"]["metrics"]["enable_wandb"] is True
    assert logged[0][0] == 1
    assert logged[0][1].items() >= {"loss": 1 / 3, "moe/layers.0.mlp/max_over_mean": 1.5}.items()
    assert logged[1:] == [(1, {"validation/loss": 4.0}), "end"]


def test_tensorboard_holds_the_scalars_and_forgets_steps_after_the_resume(tmp_path):
    for resume, last, loss in ((0, 3, 1.0), (1, 3, 2.0)):
        config = job(tmp_path, enable_tensorboard=True, log_freq=1)
        with logger(tmp_path, config=config, resume_step=resume) as log:
            for number in range(resume + 1, last + 1):
                log.log_step(number, step(number) | {"loss": loss}, counters([[3, 1]]))
            log.log_validation(last, {"val_loss": 4.0})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 2.0)]
    assert events.Scalars("moe/layers.0.mlp/max_over_mean")[-1].value == 1.5
    assert events.Scalars("validation/loss")[-1].value == 4.0


def test_console_line_has_torchtitans_shape_on_the_first_the_last_and_every_nth_step(tmp_path):
    out, clock = io.StringIO(), Clock()
    with logger(tmp_path, config=job(tmp_path, log_freq=3), total_steps=7, clock=clock, file=out) as log:
        log.message("starting")
        for number in range(1, 8):
            clock.now += 0.5
            log.log_step(number, step(number))
        log.log_validation(7, {"val_loss": 1.25, "val_loss_per_byte": 0.3125})
    text = out.getvalue()
    assert "\x1b" not in text
    assert re.findall(r"INFO - step: +(\d+)", text) == ["1", "3", "6", "7"]
    prefix = r"\[titan\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO - "
    shape = (
        r"step:  3  loss:  0.2000  grad_norm:  3.1000  memory: +[\d.]+GiB\([\d.]+%\)  tps: 1,024  tflops: n/a  mfu: n/a"
    )
    assert re.search(prefix + shape + "\n", text)
    assert re.search(prefix + "starting\n", text)
    assert re.search(prefix + r"validate step:  7  loss:  1.2500  \(0.3125 nats per byte\)\n", text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("plain", [False, True])
def test_a_terminal_gets_a_bar_and_colours_unless_they_are_off(tmp_path, monkeypatch, plain):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    config = job(tmp_path, log_freq=1, disable_color_printing=plain)
    with logger(tmp_path, config=config, total_steps=2, file=out) as log:
        log.log_step(1, step(1))
        log.log_step(2, step(2))
    text = out.getvalue()
    assert "1/2" in text and "left" in text
    assert ("\x1b[31mstep:" in text) is not plain
