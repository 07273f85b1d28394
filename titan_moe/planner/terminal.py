"""A prediction on the terminal, and as JSON."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from titan_moe.models.count import Shape
from titan_moe.planner.activations import fate
from titan_moe.planner.explain import binding_wall, fit_sentence, shares
from titan_moe.planner.memory import LAYERS, stage_rows
from titan_moe.planner.run import Run
from titan_moe.planner.systems import System

HIDDEN = ("orders", "starts", "times")
"""Parts of a result that are the simulation itself: the trace has them."""


def as_json(result: dict[str, Any]) -> str:
    """The result without the simulated operations."""
    return json.dumps({key: value for key, value in result.items() if key not in HIDDEN}, indent=1)


def layout_line(run: Run) -> str:
    """The layout in a line, such as ``TP1 PP4 VPP4 EP64 DP64, 128 micro-batches of 1``."""
    parts = {"TP": run.tp, "CP": run.cp, "PP": run.pp, "VPP": run.vpp, "EP": run.ep, "ETP": run.etp, "DP": run.dp}
    shown = " ".join(f"{name}{value}" for name, value in parts.items() if value > 1 or name in ("TP", "PP", "EP"))
    options = [run.precision, run.dispatcher]
    options += [name for name, on in (("overlap", run.ep_overlap), ("graphs", run.cuda_graph)) if on]
    if run.moe_save != "preact":
        options.append(f"experts keep {run.moe_save}")
    if run.recv_capacity_factor:
        options.append(f"room for {run.recv_capacity_factor:g} x even rows")
    if run.recompute:
        options.append("recompute " + ", ".join(run.recompute))
    if run.offload:
        options.append("offload " + ", ".join(run.offload))
    return f"{shown}, {run.count * run.passes} micro-batches of {run.mbs}; {'; '.join(options)}"


def show(s: Shape, run: Run, system: System, result: dict[str, Any], *, tensors: bool) -> None:
    """Print the prediction.

    Args:
        tensors: also list every saved tensor.
    """
    console = Console(highlight=False)
    console.print(
        f"{result['params_total'] / 1e9:.2f} B parameters, {result['params_active'] / 1e9:.2f} B active; "
        f"{result['flops_per_token'] / 1e9:.1f} GFLOPs per token at {run.seq} tokens"
    )
    console.print(f"{run.gpus} x {system.name} (constants of {system.release}): {layout_line(run)}")
    table = Table(title="GiB per pipeline rank")
    names = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    for name in ("rank", *names, "passes in flight per stage"):
        table.add_column(name, justify="right")
    for rank, memory in enumerate(result["ranks"]):
        passes = " ".join(f"{stage}:{count}" for stage, count in zip(memory["stages"], memory["passes"], strict=True))
        table.add_row(str(rank), *(f"{memory[name]:.1f}" for name in names), passes)
    if run.rank_rule == "report":
        memory = result["memory_gib"]
        table.add_row("report", *(f"{memory[name]:.1f}" for name in names), "Table 3's rule")
    console.print(table)
    console.print(fit_sentence(s, run, system, result))
    for note in result.get("not_priced", []):
        console.print(f"not priced, planned as if it were off: {note}")
    if tensors:
        console.print(_tensors(s, run))
    console.print(
        f"step {result['step_time_s']:.2f} s: {result['tflops_per_gpu']:.0f} TFLOPS and "
        f"{result['tokens_per_s_per_gpu']:.0f} tokens per s and GPU; bubble {result['bubble_fraction']:.1%}; "
        f"all-to-all {result['a2a_us']['dispatch']:.0f} us; bound by {binding_wall(result)}"
    )
    times = Table(title="where the busiest rank's step goes")
    times.add_column("component")
    times.add_column("s", justify="right")
    times.add_column("share", justify="right")
    for name, share in shares(result).items():
        if share >= 0.001:
            times.add_row(name, f"{share * result['step_time_s']:.2f}", f"{share:.1%}")
    console.print(times)


def _tensors(s: Shape, run: Run) -> Table:
    table = Table(title="saved tensors of one micro-batch")
    for name in ("part", "tensor", "shape", "MiB", "kept for", "removed by", "here"):
        table.add_column(name)
    seen = set()
    for stage in run.stages:
        for part, _, rows in stage_rows(s, run, stage):
            if part in seen:
                continue
            seen.add(part)
            for row in rows:
                ways = [f"recompute {row['recompute']}"] * bool(row["recompute"])
                ways += [f"offload {row['offload']}"] * bool(row["offload"])
                shape = f"[{row['tokens']:g}, {row['width']:g}] x {row['size']:g} B"
                size = f"{row['bytes'] / 2**20:.1f}"
                table.add_row(
                    part,
                    row["name"],
                    shape,
                    size,
                    row["why"],
                    ", ".join(ways),
                    fate(row, run) if part in LAYERS else "kept",
                )
    return table
