"""What optimizers cost and reach: the tables of docs/memory.md, section "Optimizers".

    python benchmarks/optimizers.py bytes              bytes of state per parameter, formula and measured
    python benchmarks/optimizers.py offload            time of a step, and bytes on the device, with state offload
    python benchmarks/optimizers.py refused            what float16 and float8 would lose as main gradients and masters
    python benchmarks/optimizers.py moments [--steps]  loss with bfloat16 moments beside float32's
    python benchmarks/optimizers.py muon [--steps]     Muon beside AdamW, each at three learning rates

The last two train ``train_configs/debug.toml`` one run after the other, on all threads of this process. A finished run
is a line of ``--results``, and not run again: after an interruption, or ``--runs`` new ones, the same command goes on.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from titan_moe import models
from titan_moe.config import load_config
from titan_moe.config.job import Optimizer
from titan_moe.models import token_losses
from titan_moe.optim import build_optimizer
from titan_moe.optim.rounding import places, uniform
from titan_moe.optim.storage import Storage, storage_for
from titan_moe.trainer import train

CONFIG = Path(__file__).parents[1] / "train_configs" / "debug.toml"
KINDS = {
    "AdamW, float32": ({}, "float32", 4 + 4),
    "AdamW, bfloat16 moments": ({"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}, "float32", 2 + 2),
    "AdamW, float16 moments": ({"exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float16"}, "float32", 4 + 4 / 32),
    "AdamW, float8 moments": ({"exp_avg_dtype": "float8", "exp_avg_sq_dtype": "float8"}, "float32", 2 + 4 / 32),
    "AdamW, bfloat16 parameters, float32 masters": ({"master_dtype": "float32"}, "bfloat16", 4 + 4 + 4),
    "AdamW, bfloat16 parameters, remainders, bfloat16 moments": (
        {"store_param_remainders": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
        "bfloat16",
        2 + 2 + 2,
    ),
    "Muon, float32": ({"name": "Muon"}, "float32", 4),
    "Muon, bfloat16 momentum": ({"name": "Muon", "exp_avg_dtype": "bfloat16"}, "float32", 2),
}


def stepped(options: dict, dtype: str) -> tuple[torch.nn.Module, object]:
    """The debug model after one step on random gradients."""
    torch.manual_seed(0)
    model = models.build("qwen3_moe", "debug").to(getattr(torch, dtype))
    optimizer = build_optimizer(model, Optimizer(**options))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def show_bytes() -> Table:
    table = Table("optimizer", "bytes a parameter: formula", "measured, matrices", "measured, all")
    for name, (options, dtype, formula) in KINDS.items():
        model, optimizer = stepped(options, dtype)
        # Embeddings and the head are not Muon's.
        chosen = "Muon" if options.get("name") == "Muon" else "AdamW"
        groups = [group for group in optimizer.param_groups if group["algorithm"] == chosen]
        matrices = [p for group in groups for p in group["params"] if p.ndim > 1]
        size = sum(v.nbytes for p in matrices for key, v in optimizer.state[p].items() if key != "step")
        every = sum(optimizer.state_bytes()) / sum(p.numel() for p in model.parameters())
        table.add_row(name, f"{formula:.3f}", f"{size / sum(p.numel() for p in matrices):.3f}", f"{every:.3f}")
    return table


def show_offload(repeats: int = 20) -> Table:
    table = Table("optimizer", "state between steps, MB: device", "host", "ms a step")
    for name in ("AdamW, float32", "AdamW, bfloat16 moments", "Muon, float32"):
        options, dtype, _ = KINDS[name]
        for where in ({}, {"offload_fraction": 1.0, "offload_bucket_mb": 4}, {"cpu_step_fraction": 1.0}):
            _, optimizer = stepped(options | where, dtype)
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                optimizer.step()
                seconds.append(time.perf_counter() - start)
            label = f"{name}, " + (", ".join(f"{key} {value:g}" for key, value in where.items()) or "all on the device")
            here, away = (f"{size / 1e6:.2f}" for size in optimizer.state_bytes())
            table.add_row(label, here, away, f"{1e3 * statistics.median(seconds):.1f}")
    return table


SUMS = {
    "float32": ("float32", False),
    "bfloat16": ("bfloat16", False),
    "float16 as it is": (torch.float16, False),
    "float16, scales": ("float16", False),
    "float8, scales": ("float8", False),
    "float8, scales, by chance": ("float8", True),
}


class Sum:
    """A gradient that is stored in another dtype between additions."""

    def __init__(self, parameter: torch.nn.Parameter, dtype: str | torch.dtype, by_chance: bool) -> None:
        plain = isinstance(dtype, torch.dtype)
        self.storage = Storage("sum", dtype) if plain else storage_for("sum", dtype, parameter)
        self.state, self.by_chance, self.additions = self.storage.new(parameter.detach()), by_chance, torch.zeros(())
        self.places = places(parameter.shape, (0,) * parameter.ndim, parameter.shape, parameter.device)

    def value(self) -> torch.Tensor:
        return self.storage.read(self.state, torch.float32)

    def add(self, grad: torch.Tensor) -> None:
        self.additions += 1
        chance = (lambda: uniform(self.places, 1, self.additions)) if self.by_chance else None
        self.storage.write(self.state, self.value() + grad, chance)


def show_sums(parts: tuple[int, ...] = (4, 16, 64)) -> Table:
    """Micro-batches of two sequences of 128 bytes, of a global batch of 4 M tokens; matrices only."""
    text = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("*.py")))
    tokens = torch.tensor(list(text[: parts[-1] * 2 * 129])).view(-1, 2, 129)
    model = models.build("qwen3_moe", "debug", seed=0)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    exact = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in matrices]
    kept = {name: [Sum(parameter, *kind) for parameter in matrices] for name, kind in SUMS.items()}
    rows = {name: [] for name in SUMS}
    for count, ids in enumerate(tokens, 1):
        loss = token_losses(model(ids[:, :-1]), ids[:, 1:], None, 0.0).total / 2**22
        for i, grad in enumerate(torch.autograd.grad(loss, matrices)):
            exact[i] += grad
            for sums in kept.values():
                sums[i].add(grad)
        if count in parts:
            whole = torch.cat([value.flatten() for value in exact])
            for name, sums in kept.items():
                found = torch.cat([one.value().flatten() for one in sums]).double()
                rows[name].append(f"{100 * ((found - whole).norm() / whole.norm()).item():.2g}%")
                last = [f"{found.norm() / whole.norm():.3f}", f"{100 * (found == 0).double().mean().item():.0f}%"]
                rows[name] = rows[name] if count < parts[-1] else rows[name] + last
    table = Table("main gradients in", *(f"error after {count}" for count in parts), "length, of the exact", "zeros")
    for name, row in rows.items():
        table.add_row(name, *row)
    return table


def show_masters() -> Table:
    """What a first step of AdamW moves, by the learning rate in each element."""
    model, rates = models.build("qwen3_moe", "debug", seed=0), (1e-3, 1e-4, 1e-5)
    table = Table("masters in", *(f"moved by lr {lr:g}" for lr in rates))
    for dtype in ("float32", "float16", "float8"):
        moved = torch.zeros(len(rates))
        matrices = [parameter.detach() for parameter in model.parameters() if parameter.ndim > 1]
        for parameter in matrices:
            storage = storage_for("master", dtype, parameter)
            state = storage.new(parameter)
            for i, lr in enumerate(rates):
                storage.write(state, parameter.clone())
                before = storage.read(state, torch.float32).clone()
                storage.write(state, before - lr)
                moved[i] += (storage.read(state, torch.float32) != before).sum()
        share = moved / sum(parameter.numel() for parameter in matrices)
        table.add_row(dtype, *(f"{100 * one:.1f}%" for one in share.tolist()))
    return table


class Runs:
    """Training runs of the debug configuration, each made once.

    Args:
        file: a JSON line for each finished run.
        steps: optimizer steps of a run.
        most: new runs to make; None: all that are asked for.
    """

    def __init__(self, file: Path, steps: int, most: int | None) -> None:
        self.file, self.steps, self.left = file, steps, most
        lines = file.read_text().splitlines() if file.exists() else []
        self.known = {self._key(run["steps"], run["options"]): run for run in map(json.loads, lines)}

    def get(self, **options: object) -> dict | None:
        """``losses`` by step, the last ``validation`` loss in nats per byte, ``seconds``; None: not made yet."""
        key = self._key(self.steps, options)
        if key not in self.known and self.left != 0:
            self.left = None if self.left is None else self.left - 1
            self.known[key] = {"steps": self.steps, "options": options, **trained(self.steps, **options)}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps(self.known[key]) + "\n")
        return self.known.get(key)

    @staticmethod
    def _key(steps: int, options: dict) -> str:
        return json.dumps([steps, options], sort_keys=True)


def trained(steps: int, **options: object) -> dict:
    """One run; see ``Runs.get``."""
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--job.config_file", str(CONFIG), "--job.dump_folder", folder, "--training.steps", str(steps)]
        argv += ["--checkpoint.no_enable", "--lr_scheduler.warmup_steps", str(steps // 20)]
        argv += [word for key, value in options.items() for word in (f"--optimizer.{key}", str(value))]
        start = time.perf_counter()
        train(load_config(argv))
        seconds = time.perf_counter() - start
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    validation = [line["val_loss_per_byte"] for line in lines if "val_loss_per_byte" in line]
    return {"losses": losses, "validation": validation[-1], "seconds": seconds}


def smooth(losses: list[float], window: int = 25) -> list[float]:
    """Means of the last ``window`` losses: single batches differ by more than optimizers do."""
    return [statistics.mean(losses[i - window : i]) for i in range(window, len(losses) + 1)]


def show_moments(runs: Runs) -> Table:
    table = Table("moments", "last validation loss", "largest distance of the smoothed loss", "s")
    reference = runs.get()
    add_run(table, "float32", reference, "")
    for kind in ("bfloat16", "float8"):
        for options in ({}, {"stochastic_rounding": "true"}):
            run = runs.get(exp_avg_dtype=kind, exp_avg_sq_dtype=kind, **options)
            apart = ""
            if run and reference:
                pairs = zip(smooth(run["losses"]), smooth(reference["losses"]), strict=True)
                apart = f"{100 * max(abs(a / b - 1) for a, b in pairs):.2f}%"
            add_run(table, kind + (", by chance" if options else ""), run, apart)
    return table


def show_muon(runs: Runs) -> Table:
    table = Table("optimizer", "validation loss, nats a byte", "lr", "s")
    for name, rates in (("AdamW", (5e-4, 1e-3, 2e-3)), ("Muon", (4e-3, 8e-3, 1.6e-2))):
        for lr in rates:
            add_run(table, name, runs.get(name=name, lr=lr), f"{lr:g}")
    return table


def add_run(table: Table, name: str, run: dict | None, beside: str) -> None:
    """A row; without a run, one that says so."""
    loss, seconds = (f"{run['validation']:.4f}", f"{run['seconds']:.0f}") if run else ("not run yet", "")
    table.add_row(name, loss, beside, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("bytes", "offload", "refused", "moments", "muon"))
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of each training run")
    file = Path("outputs") / "optimizer_runs.jsonl"
    parser.add_argument("--results", type=Path, default=file, help=f"finished training runs; default {file}")
    parser.add_argument("--runs", type=int, help="new training runs to make at most")
    args = parser.parse_args()
    runs = Runs(args.results, args.steps, args.runs)
    tables = {
        "bytes": lambda: [show_bytes()],
        "offload": lambda: [show_offload()],
        "refused": lambda: [show_sums(), show_masters()],
        "moments": lambda: [show_moments(runs)],
        "muon": lambda: [show_muon(runs)],
    }
    Console(width=140).print(*tables[args.table]())


if __name__ == "__main__":
    main()
