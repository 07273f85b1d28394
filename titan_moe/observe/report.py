"""``titan-moe report``: a run as one HTML file that needs no network and no other file."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.config.job import JobConfig
from titan_moe.errors import DataError
from titan_moe.observe import charts
from titan_moe.observe.charts import Series, heat_legend, heat_map, line_chart
from titan_moe.observe.history import History, read_history, subsample
from titan_moe.observe.jsonl import CONFIG_NAME
from titan_moe.observe.page import SCRIPT, STYLE


def write_report(output_dir: str | Path) -> Path:
    """Draw the run in ``output_dir`` as ``report.html`` there, and return that path.

    Args:
        output_dir: ``job.dump_folder`` of a run, finished or not.

    Raises:
        DataError: when the folder, its metrics or its ``config.toml`` cannot be read, or the report not written.
    """
    folder = Path(output_dir)
    history, config = read_history(folder), _read_config(folder)
    path = folder / "report.html"
    try:
        path.write_text(_page(folder, history, config), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}).") from error
    return path


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}. Repair or remove it.") from error


def _page(folder: Path, history: History, config: dict[str, Any]) -> str:
    model, job = config.get("model", {}), config.get("job", {})
    title = " ".join(str(model[key]) for key in ("name", "flavor") if key in model) or folder.resolve().name
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(str(job['description']))}</p>" if job.get("description") else "",
        _tiles(history),
        "<h2>Training</h2>",
        _training_charts(history),
        _moe_section(history),
        _config_section(config),
    ]
    geometry = {"L": charts.LEFT, "R": charts.RIGHT, "T": charts.TOP, "B": charts.BOTTOM}
    script = SCRIPT.replace("{geometry}", json.dumps(geometry | {"range": charts.LOG2_RANGE}))
    script = script.replace("{palette}", json.dumps(charts.palette().tolist(), separators=(",", ":")))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>{''.join(parts)}</main>"
        # CDATA keeps the file well-formed as XML too.
        f'<div id="tip"></div><script>//<![CDATA[\n{script}\n//]]></script></body></html>\n'
    )


def _tiles(history: History) -> str:
    steps, validation = history.steps, history.validation
    last = steps["step"][-1]
    tiles = [(f"{last:,.0f}", "steps")]
    if steps.has("tokens"):
        tiles.append((charts.short(_last(steps["tokens"])), "tokens"))
    if steps.has("loss"):
        window = steps["loss"][-max(1, min(100, len(steps) // 20)) :]
        label = "training loss, nats per token" + (f" (mean of last {len(window)})" if len(window) > 1 else "")
        tiles.append((f"{np.nanmean(window):.4f}" if np.isfinite(window).any() else "not finite", label))
    if validation.has("val_loss"):
        best = int(np.nanargmin(validation["val_loss"]))
        tiles.append((f"{_last(validation['val_loss']):.4f}", "validation loss, nats per token"))
        if validation.has("val_loss_per_byte"):
            tiles.append((f"{_last(validation['val_loss_per_byte']):.4f}", "validation loss, nats per byte"))
        if validation["step"][best] != validation["step"][-1]:
            step = validation["step"][best]
            tiles.append((f"{validation['val_loss'][best]:.4f}", f"best validation loss, at step {step:,.0f}"))
    for key, form, unit in (
        ("tps", ",.0f", "tokens per second, median"),
        ("tflops", ",.3g", "TFLOPS per device, median"),
        ("mfu", ".1f", "% of peak FLOPS, median"),
    ):
        if steps.has(key):
            tiles.append((format(np.nanmedian(steps[key]), form), unit))
    if steps.has("memory_gib"):
        tiles.append((f"{np.nanmax(steps['memory_gib']):.2f}", "GiB peak memory"))
    if bad := int((steps["nonfinite"] == 1).sum()):
        tiles.append((f'<span class="bad">{bad:,}</span>', "steps not finite"))
    return (
        '<div class="tiles">'
        + "".join(f"<div class='tile'><b>{v}</b><span>{k}</span></div>" for v, k in tiles)
        + "</div>"
    )


def _last(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)][-1])


def _training_charts(history: History) -> str:
    steps, validation = history.steps, history.validation
    curve = _curves(steps)
    flags = steps["step"][steps["nonfinite"] == 1][:200].tolist()
    loss = [curve("training", "loss", "a")]
    if steps.has("mtp_loss"):
        loss.append(curve("multi-token prediction", "mtp_loss", "d"))
    if validation.has("val_loss"):
        loss.append(Series("validation", subsample(validation["step"], validation["val_loss"]), "b", True))
    cards = [_card("Loss", line_chart(loss, "loss (nats per token)", flags=flags, wide=True), wide=True)]
    per_byte = [("val_loss_per_byte", "Validation loss per byte", "loss (nats per byte)")]
    for key, title, label in per_byte:
        if validation.has(key) and not np.array_equal(validation[key], validation["val_loss"]):
            series = [Series(title, subsample(validation["step"], validation[key]), "b", True)]
            cards.append(_card(title, line_chart(series, label)))
    for key, title, label, style, zero in (
        ("lr", "Learning rate", "learning rate", "c", True),
        ("grad_norm", "Gradient norm", "norm before clipping", "d", True),
        ("tps", "Throughput", "tokens per second", "a", True),
        ("tflops", "Compute", "TFLOPS per device", "a", True),
        ("mfu", "Model FLOPS utilisation", "% of peak", "a", True),
        ("memory_gib", "Peak memory", "GiB", "c", True),
        ("data_wait_s", "Waiting for data", "seconds per step", "b", True),
    ):
        # Both are throughput times a constant: the one with more meaning is enough.
        if steps.has(key) and not (key == "tflops" and steps.has("mfu")):
            cards.append(_card(title, line_chart([curve(title, key, style)], label, zero=zero)))
    note = ""
    if loss[0].data.low is not None:
        note = (
            "<p>A point is the mean of several steps; the shade reaches from their least to their greatest value.</p>"
        )
    return f'{note}<div class="charts">{"".join(cards)}</div>'


def _curves(steps: Any) -> Callable[[str, str, str], Series]:
    return lambda name, key, style: Series(name, subsample(steps["step"], steps[key]), style)


def _moe_section(history: History) -> str:
    steps = history.steps
    if not history.last_moe:
        return ""
    curve = _curves(steps)
    imbalance = [curve("worst layer", "imbalance_worst", "b"), curve("mean of layers", "imbalance_mean", "a")]
    cards = [
        _card("Load imbalance", line_chart(imbalance, "busiest expert ÷ mean")),
        _card(
            "Dead experts",
            line_chart([curve("all layers", "dead_experts", "b")], "experts without a token", zero=True, whole=True),
        ),
    ]
    if np.nanmax(steps["dropped"], initial=0.0) > 0:
        cards.append(
            _card("Dropped", line_chart([curve("mean of layers", "dropped", "b")], "share dropped", zero=True))
        )
    for key, title, label in (
        ("aux_loss", "Balancing loss", "auxiliary loss"),
        ("z_loss", "Router z-loss", "auxiliary loss"),
    ):
        if np.nanmax(np.abs(steps[key]), initial=0.0) > 0:
            cards.append(_card(title, line_chart([curve("sum of layers", key, "d")], label)))
    if steps.has("bias_max") and np.nanmax(np.abs(steps["bias_max"])) > 0:
        bias = [curve("greatest", "bias_max", "b"), curve("least", "bias_min", "a")]
        cards.append(_card("Selection bias", line_chart(bias, "expert bias")))
    parts = ["<h2>Experts</h2>", f'<div class="charts">{"".join(cards)}</div>', _layer_table(history)]
    if history.loads:
        maps = [_card(name, heat_map(*bins.matrix())) for name, bins in history.loads.items()]
        parts += ["<h2>Expert load per layer</h2>", heat_legend(), f'<div class="charts">{"".join(maps)}</div>']
    return "".join(parts)


def _layer_table(history: History) -> str:
    head = ("layer", "busiest ÷ mean", "dead experts", "dropped", "auxiliary loss", "bias, least", "bias, greatest")
    rows = []
    for layer in history.last_moe:
        dead = layer["dead_experts"]
        cells = [
            f"<td>{escape(layer['layer'])}</td>",
            f"<td>{layer['max_over_mean']:.3f}</td>",
            f"<td class='bad'>{dead}</td>" if dead else "<td>0</td>",
            f"<td>{layer['dropped']:.2%}</td>",
        ]
        for key in ("aux_loss", "bias_min", "bias_max"):
            value = layer[key]
            cells.append(f"<td>{'none' if value is None else format(value, '.4g')}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    header = "".join(f"<th>{name}</th>" for name in head)
    step = history.steps["step"][-1]
    return (
        f"<h2>Layers at step {step:,.0f}</h2><div class='card scroll'><table><thead><tr>{header}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _config_section(config: dict[str, Any]) -> str:
    if not config:
        return ""
    defaults = asdict(JobConfig())
    sections = []
    for name, values in config.items():
        if not isinstance(values, dict):
            continue
        rows = []
        for key, value in values.items():
            changed = value != defaults.get(name, {}).get(key)
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            mark = ' class="set"' if changed else ""
            rows.append(f"<div{mark}><span>{escape(key)}</span><code>{escape(str(text))}</code></div>")
        if rows:
            sections.append(f"<section><h3>{escape(name)}</h3>{''.join(rows)}</section>")
    return f"<h2>Configuration</h2><p>Bold: not the default.</p><div class='card config'>{''.join(sections)}</div>"


def _card(title: str, body: str, *, wide: bool = False) -> str:
    return f'<div class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3>{body}</div>'
