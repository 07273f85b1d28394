"""The simulated step as a trace that Perfetto and Chrome open (Trace Event Format, JSON object form)."""

import json
from pathlib import Path
from typing import Any

from titan_moe.planner.run import Run

NAMES = ("F", "B", "I", "W")
"""Forward, backward, and the two halves of a split one: gradients of inputs and of weights."""


def trace_events(run: Run, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One complete event per operation, microseconds; one thread per pipeline rank, the update behind the passes.

    The latest end is the predicted step.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "one pipeline, simulated"}},
    ]
    times, starts = result["times"], result["starts"]
    orders = result["orders"] or [[[kind, 0, m] for m in range(run.count) for kind in (0, 1)]]
    if not starts:
        at, starts = 0.0, [[]]
        for kind, stage, _ in orders[0]:
            starts[0].append(at)
            at += times[kind][stage]
    end = max(
        start + times[kind][stage]
        for order, begins in zip(orders, starts, strict=True)
        for (kind, stage, _), start in zip(order, begins, strict=True)
    )
    for rank, (order, begins) in enumerate(zip(orders, starts, strict=True)):
        events.append(
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        )
        for again in range(run.passes):
            for (kind, stage, micro), start in zip(order, begins, strict=True):
                arguments = {"stage": stage, "micro_batch": again * run.count + micro}
                name = f"{NAMES[kind]} stage {stage} #{arguments['micro_batch']}"
                at = again * end + start
                events.append(_event(name, NAMES[kind], rank, at, times[kind][stage], arguments))
        at = end * run.passes
        for name in ("data parallel", "optimizer"):
            seconds = result["time_s"][name]
            events.append(_event(name, name, rank, at, seconds, {}))
            at += seconds
    return events


def _event(name: str, kind: str, rank: int, start: float, seconds: float, arguments: dict) -> dict[str, Any]:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": arguments,
    }


def write_trace(path: Path, run: Run, result: dict[str, Any]) -> None:
    """Write the events; the file is put in place whole."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps({"traceEvents": trace_events(run, result), "displayTimeUnit": "ms"}), encoding="utf-8")
    aside.replace(path)
