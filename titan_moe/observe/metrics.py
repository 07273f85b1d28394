"""The trainer's one place to report to: ``metrics.jsonl``, console, TensorBoard, Weights & Biases."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from os import sysconf
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import Tensor

from titan_moe.config import JobConfig, to_toml
from titan_moe.errors import ConfigError, TrainingError
from titan_moe.observe.console import Console, step_parts
from titan_moe.observe.flops import peak_flops
from titan_moe.observe.jsonl import CONFIG_NAME, FILE_NAME, encode, start_file

TIMING_KEYS = frozenset({"tps", "tflops", "mfu", "memory_gib", "data_wait_s"})
"""Keys that depend on the clock and the machine; all else is equal when a run is repeated."""

LOAD_LIMIT = 4096
"""Experts times layers up to which every step records each expert's load; beyond, only printed steps do."""

GIB = 2**30


def moe_records(moe: Mapping[str, Any], *, with_load: bool = True) -> list[dict[str, Any]]:
    """Per-layer load figures from the counters of one step.

    Args:
        moe: the result of ``titan_moe.moe.finish_step``; what is on a GPU is copied, which waits for it.
        with_load: include ``load``, the tokens per expert.

    Returns:
        One object per MoE layer. ``max_over_mean`` is the busiest expert's tokens over the mean (1 is perfect, 0 when
        no token came); ``dead_experts`` got no token; ``dropped`` is a share of the routed assignments;
        the losses and ``bias_min`` and ``bias_max`` (0 without an expert bias) are null where not finite.
    """
    if not moe["names"]:
        return []
    moe = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in moe.items()}
    counts_LE = moe["counts_LE"]
    experts_L = moe["num_experts_L"]
    real_LE = torch.arange(counts_LE.shape[1]) < experts_L[:, None]
    mean_L = counts_LE.sum(1).double() / experts_L
    columns = {
        "max_over_mean": counts_LE.amax(1) / mean_L.masked_fill(mean_L == 0, 1.0),
        "dead_experts": ((counts_LE == 0) & real_LE).sum(1),
        "dropped": moe["dropped_L"].double() / moe["routed_L"].clamp_min(1),
        "aux_loss": moe["aux_loss_L"],
        "z_loss": moe["z_loss_L"],
        "bias_min": moe["bias_min_L"],
        "bias_max": moe["bias_max_L"],
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    records = [
        {"layer": name, **dict(zip(columns, row, strict=True))} for name, row in zip(moe["names"], rows, strict=True)
    ]
    for record in records:
        for key in ("aux_loss", "z_loss", "bias_min", "bias_max"):
            if not abs(record[key]) < float("inf"):
                record[key] = None
    if with_load:
        for record, row, experts in zip(records, counts_LE.tolist(), experts_L.tolist(), strict=True):
            record["load"] = row[:experts]
    return records


class MetricsLogger:
    """Writes what a run measures, and its ``config.toml``; on ranks other than 0 it does nothing.

    Throughput is measured here, from the cumulative token count and the clock between two steps.

    Args:
        config: the run's configuration; job, metrics and training are read.
        rank: this process.
        total_steps: length of the run.
        resume_step: the last step of the checkpoint that was loaded; 0 for a fresh start.
        start_tokens: tokens trained on up to ``resume_step``.
        flops_per_token: from ``titan_moe.observe.flops``; None leaves ``tflops`` and ``mfu`` null.
        num_devices: processes that share the work.
        device: where training runs, for its memory and peak; CPU by default.
        clock: seconds, for tests.
        file: where console lines go; standard output by default.

    Raises:
        ConfigError: when the dump folder cannot be written.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        rank: int = 0,
        total_steps: int,
        resume_step: int = 0,
        start_tokens: int = 0,
        flops_per_token: float | None = None,
        num_devices: int = 1,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        file: TextIO | None = None,
    ):
        self.active = rank == 0
        if not self.active:
            return
        self.log_freq = max(1, config.metrics.log_freq)
        self.total_steps, self.first_step = total_steps, resume_step + 1
        self.flops, self.num_devices, self.clock = flops_per_token, num_devices, clock
        self.device = device or torch.device("cpu")
        self.peak_flops = peak_flops(self.device)
        folder = Path(config.job.dump_folder)
        written = CONFIG_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG_NAME).write_text(to_toml(config), encoding="utf-8")
            written = FILE_NAME
            self.path = start_file(folder, resume_step)
            self.jsonl = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder = {config.job.dump_folder!r}: {written} cannot be written there "
                f"({error.strerror}). Choose another folder."
            ) from error
        self.tensorboard = self.wandb = None
        if config.metrics.enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(folder / config.metrics.save_tb_folder), purge_step=self.first_step)
        if config.metrics.enable_wandb:
            import wandb

            self.wandb = wandb.init(project="titan_moe", dir=str(folder), config=asdict(config))
        self.console = Console(total_steps, resume_step, color=not config.metrics.disable_color_printing, file=file)
        self.last_tokens = self.printed_tokens = start_tokens
        self.last_time = self.printed_time = clock()

    def message(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.active:
            self.console.message(text)

    def explain_memory(self) -> None:
        """Say what the memory in the lines to come is, and of what their share is."""
        if not self.active:
            return
        total = f"{self._total_memory() / GIB:.2f} GiB"
        if self.device.type == "cuda":
            text = f"memory: the most reserved so far, of the {total} of {torch.cuda.get_device_name(self.device)}"
        else:
            text = f"memory: the most resident in this process so far, of this machine's {total} of RAM"
        self.console.message(text)

    def log_step(self, step: int, metrics: Mapping[str, float], moe: Mapping[str, Any] | None = None) -> None:
        """Record a finished optimizer step.

        Args:
            step: the step, from 1.
            metrics: at least ``loss`` (nats per token), ``grad_norm``, ``lr`` and ``tokens`` (cumulative, over all
                processes); others, such as ``mtp_loss``, ``data_wait_s`` (seconds) or ``skipped`` (steps skipped
                in a row), are written as they are.
            moe: the result of ``titan_moe.moe.finish_step``; None for a dense model.

        Raises:
            TrainingError: when the line cannot be written, for example on a full disk.
        """
        if not self.active:
            return
        assert {"loss", "grad_norm", "lr", "tokens"} <= metrics.keys(), sorted(metrics)
        now, values = self.clock(), {key: _number(value) for key, value in metrics.items()}
        exact = {"step": step} | {key: value for key, value in values.items() if key not in TIMING_KEYS}
        tokens = values["tokens"]
        timing = self._throughput(tokens - self.last_tokens, now - self.last_time)
        memory = self._peak_memory()
        timing |= {"memory_gib": memory / GIB} | {key: value for key, value in values.items() if key in TIMING_KEYS}
        # A function of the step alone, so that a resumed run writes what an uninterrupted one does.
        printed = step % self.log_freq == 0 or step in (1, self.total_steps)
        record = exact | timing
        if moe is not None:
            record["moe"] = moe_records(moe, with_load=printed or moe["counts_LE"].numel() <= LOAD_LIMIT)
        self._write(record)
        if printed or step == self.first_step:
            average = self._throughput(tokens - self.printed_tokens, now - self.printed_time)
            self.console.line(*step_parts(step, record | average, memory / self._total_memory()))
            self.printed_tokens, self.printed_time = tokens, now
            self._track(step, record | average, record.get("moe", []))
        self.console.advance(step)
        self.last_tokens, self.last_time = tokens, now

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation after ``step``.

        Args:
            step: steps trained.
            metrics: ``val_loss`` (nats per token); also ``val_loss_per_byte`` (nats) and ``val_tokens``.
        """
        if not self.active:
            return
        record = {"step": step} | {key: _number(value) for key, value in metrics.items()}
        self._write(record)
        loss, per_byte = record["val_loss"], record.get("val_loss_per_byte")
        tail = "" if per_byte is None else f"  ({per_byte:.4f} nats per byte)"
        self.console.line((f"validate step: {step:2}  ", "red"), (f"loss: {loss:7.4f}{tail}", "green"))
        self._track(step, {f"validation/{key.removeprefix('val_')}": record[key] for key in metrics}, [])

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave what runs inside, such as an evaluation or a checkpoint, out of the throughput."""
        if not self.active:
            yield
            return
        start = self.clock()
        try:
            yield
        finally:
            spent = self.clock() - start
            self.last_time += spent
            self.printed_time += spent

    def close(self) -> None:
        """Remove the progress bar and close every file."""
        if not self.active:
            return
        self.console.close()
        self.jsonl.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _throughput(self, tokens: float, seconds: float) -> dict[str, float | None]:
        tps = tokens / seconds if seconds > 0 else None
        tflops = mfu = None
        if tps is not None and self.flops is not None:
            tflops = self.flops * tps / self.num_devices / 1e12
            if self.peak_flops is not None:
                mfu = 100 * tflops * 1e12 / self.peak_flops
        return {"tps": tps, "tflops": tflops, "mfu": mfu}

    def _total_memory(self) -> int:
        """Bytes that the device has."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return sysconf("SC_PHYS_PAGES") * sysconf("SC_PAGE_SIZE")

    def _peak_memory(self) -> int:
        """Most bytes so far: reserved on a GPU, else resident in this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        # ru_maxrss is in KiB on Linux, in bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self.jsonl.write(encode(record))
            self.jsonl.flush()
        except OSError as error:
            # What is still in its buffer would fail again when the run closes the file.
            with suppress(OSError):
                self.jsonl.close()
            raise TrainingError(
                f"step {record['step']}: {self.path} cannot be written ({error.strerror}). "
                "Free space there and resume from the last checkpoint."
            ) from error

    def _track(self, step: int, record: Mapping[str, Any], layers: list[dict[str, Any]]) -> None:
        scalars = {key: value for key, value in record.items() if key not in ("step", "moe") and value is not None}
        for layer in layers:
            name = layer["layer"]
            scalars |= {f"moe/{name}/{key}": v for key, v in layer.items() if isinstance(v, int | float)}
        if self.tensorboard is not None:
            try:
                for key, value in scalars.items():
                    self.tensorboard.add_scalar(key, value, step)
                self.tensorboard.flush()
            except OSError as error:
                raise TrainingError(
                    f"step {step}: TensorBoard's file cannot be written ({error.strerror or error}). "
                    "Free space and resume from the last checkpoint, or set metrics.no_enable_tensorboard."
                ) from error
        if self.wandb is not None:
            self.wandb.log(scalars, step=step)


def _number(value: float | Tensor) -> float | int:
    if isinstance(value, Tensor):
        return value.item()
    return value if isinstance(value, int) else float(value)
