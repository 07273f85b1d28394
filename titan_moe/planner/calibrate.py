"""``titan-moe plan calibrate``: the constants of a system, fitted to runs of one's own.

A run is a dump folder of the trainer: ``config.toml`` says what ran, ``metrics.jsonl`` how fast. Fitted are the
shares of the peaks that products and memory traffic reach, and the host's time per layer: least squares of the
logarithm of predicted over measured tokens per second, held near the values that the system has. With few runs a
constant that they say nothing about stays where it is.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from titan_moe.config import load_config, read_options
from titan_moe.errors import ConfigError
from titan_moe.models.count import Shape, training_flops
from titan_moe.planner.command import own_options
from titan_moe.planner.predict import predict
from titan_moe.planner.run import Options, Run, plan_of
from titan_moe.planner.systems import System, system_of

FITTED = ("gemm_bf16", "gemm_fp8", "memory_efficiency", "host_seconds")
HOLD = 0.002
"""Weight of a constant's own logarithm: a factor of e costs as much as an error of 4% in one run."""
WARM_UP = 5
"""Steps at a run's start that do not count."""


@dataclass
class Flags:
    """Fit a system's constants to runs: --runs DIR… --system NAME --output FILE."""

    runs: list[str]
    """Dump folders of the trainer."""
    system: str
    """The system to start from."""
    output: str
    """TOML file to write; --system FILE then uses it."""
    release: str = "own"
    """Name for the software that ran."""
    gpus: int | None = None
    """GPUs of every run; by default what its metrics say."""
    start: str | None = None
    """Release of the system to start from."""
    options: list[str] = field(default_factory=list)
    """Not in config.toml: precision=mxfp8, for example."""


@dataclass
class Measured:
    """A run and its tokens per second and GPU."""

    shape: Shape
    run: Run
    speed: float


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: a run that cannot be read, or has too few steps.
    """
    flags = Flags(**read_options(Flags, argv, "titan-moe plan calibrate"))
    start = system_of(flags.system, flags.start)
    rows = [read_run(Path(folder), start, flags) for folder in flags.runs]
    system = fit(rows, start)
    lines = [
        f"# Fitted to {len(rows)} runs; predicted over measured: "
        + ", ".join(f"{predict(row.shape, row.run, system)['tokens_per_s_per_gpu'] / row.speed:.3f}" for row in rows),
        f"[{start.name}_own]",
        f'like = "{start.name}"',
        f'release = "{flags.release}"',
        *(f"{name} = {getattr(system, name)!r}" for name in FITTED),
    ]
    Path(flags.output).write_text("\n".join([*lines, ""]), encoding="utf-8")
    print("\n".join(lines))
    print(f"wrote {flags.output}")


def read_run(folder: Path, system: System, flags: Flags) -> Measured:
    """What a dump folder says of its run."""
    file = folder / "metrics.jsonl"
    if not file.is_file() or not (folder / "config.toml").is_file():
        raise ConfigError(f"--runs {str(folder)!r}: needs config.toml and metrics.jsonl. Name a run's job.dump_folder.")
    config = load_config(["--job.config_file", str(folder / "config.toml")])
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    steps = [record for record in records if record.get("tps") and record.get("step", 0) > WARM_UP]
    if not steps:
        raise ConfigError(f"{file}: no step after step {WARM_UP} says its tokens per second. Run longer.")
    tokens = median(record["tps"] for record in steps)
    options = own_options(config, _options(flags))
    shape, run = plan_of(config, flags.gpus or _devices(file, steps, config), options, system)
    return Measured(shape, run, tokens / run.gpus)


def _options(flags: Flags) -> Options:
    values = {}
    for word in flags.options:
        name, equals, value = word.partition("=")
        if not equals or name not in Options.__dataclass_fields__:
            raise ConfigError(f"--options {word!r}: expected NAME=VALUE, such as precision=mxfp8.")
        values[name] = True if value == "true" else value.split("+") if name in ("recompute", "offload") else value
    return Options(**values)


def _devices(file: Path, steps: list[dict], config) -> int:
    """Devices, from the two throughputs that a step reports: per run in tokens, per device in FLOPs."""
    from titan_moe.config import model_overrides
    from titan_moe.models import config as model_config_of
    from titan_moe.models.count import shape_of

    known = [step for step in steps if step.get("tflops")]
    if not known:
        raise ConfigError(f"{file}: says no TFLOPS, so the number of GPUs is not known. Set --gpus.")
    shape = shape_of(model_config_of(config.model.name, config.model.flavor, **model_overrides(config)))
    flops = training_flops(shape, config.training.seq_len, True, [])
    return round(median(flops * step["tps"] / step["tflops"] / 1e12 for step in known))


def fit(rows: list[Measured], start: System) -> System:
    """``start`` with the constants in ``FITTED`` that suit ``rows`` best.

    Gauss-Newton on the logarithms, with differences for slopes: the errors are nearly linear in them.
    """
    names = [name for name in FITTED if getattr(start, name) > 0]
    system = start
    for _ in range(12):
        errors = _errors(rows, system)
        slopes = []
        for name in names:
            nudged = replace(system, **{name: getattr(system, name) * 1.01})
            moved = _errors(rows, nudged)
            slopes.append([(after - before) / math.log(1.01) for after, before in zip(moved, errors, strict=True)])
        away = [math.log(getattr(system, name) / getattr(start, name)) for name in names]
        size = range(len(names))
        matrix = [
            [sum(a * b for a, b in zip(slopes[i], slopes[j], strict=True)) + HOLD * (i == j) for j in size]
            for i in size
        ]
        right = [-sum(a * e for a, e in zip(slopes[i], errors, strict=True)) - HOLD * away[i] for i in size]
        step = _solve(matrix, right)
        system = replace(
            system,
            **{
                name: getattr(system, name) * math.exp(max(-0.5, min(0.5, x)))
                for name, x in zip(names, step, strict=True)
            },
        )
        if max(map(abs, step)) < 1e-5:
            break
    return system


def _errors(rows: list[Measured], system: System) -> list[float]:
    """Logarithms of predicted over measured tokens per second."""
    return [math.log(predict(row.shape, row.run, system)["tokens_per_s_per_gpu"] / row.speed) for row in rows]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solution of a small positive definite system, by elimination."""
    n = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i in range(n):
        for j in range(i + 1, n):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    out = [0.0] * n
    for i in reversed(range(n)):
        out[i] = (rows[i][n] - sum(rows[i][j] * out[j] for j in range(i + 1, n))) / rows[i][i]
    return out
