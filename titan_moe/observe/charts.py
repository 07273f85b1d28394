"""Line charts and heat maps as SVG text. Colours and fonts come from the page's style sheet."""

import base64
import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from titan_moe.observe.history import Binned

WIDTH, HEIGHT = 600, 280
WIDE_WIDTH, WIDE_HEIGHT = 1216, 360
LEFT, RIGHT, TOP, BOTTOM = 68, 14, 14, 44


@dataclass
class Series:
    """One curve; ``style`` picks the colour in the style sheet; ``markers`` draws its points."""

    name: str
    data: Binned
    style: str = "a"
    markers: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them."""
    span = high - low or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= count)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 1,500 as 1.5k, and no more digits than it needs."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    if 0 < abs(value) < 0.01:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.4g}"


class Frame:
    """The axes of one chart: maps data to pixels and draws grid, ticks and labels."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float], width: int, height: int):
        self.x0, self.x1 = x_range
        self.y0, self.y1 = y_range
        self.width, self.height = width, height
        self.plot_width, self.plot_height = width - LEFT - RIGHT, height - TOP - BOTTOM

    def x(self, value):
        """Pixels from the left, for a number or an array."""
        return LEFT + (value - self.x0) / (self.x1 - self.x0 or 1.0) * self.plot_width

    def y(self, value):
        """Pixels from the top."""
        return TOP + (self.y1 - value) / (self.y1 - self.y0 or 1.0) * self.plot_height

    def axes(self, x_label: str, y_label: str, x_ticks: list[float], y_ticks: list[float]) -> str:
        """Grid lines, tick labels and axis labels."""
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        parts = []
        for value in y_ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 7}" y="{y + 4:.1f}">{short(value)}</text>')
        for value in x_ticks:
            x = self.x(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 18}">{short(value)}</text>')
        middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        parts.append(f'<text class="label" text-anchor="middle" x="{middle_x}" y="{self.height - 8}">{x_label}</text>')
        parts.append(
            f'<text class="label" text-anchor="middle" transform="translate(15 {middle_y}) rotate(-90)">'
            f"{escape(y_label)}</text>"
        )
        return "".join(parts)


def line_chart(
    series: list[Series],
    y_label: str,
    *,
    zero: bool = False,
    whole: bool = False,
    wide: bool = False,
    flags: Sequence[float] = (),
) -> str:
    """A chart of curves over steps.

    Args:
        series: the curves; those without a finite value are left out of the range.
        y_label: what is measured, with its unit.
        zero: start the y axis at 0.
        whole: label the y axis at whole numbers only.
        wide: a chart that spans the page.
        flags: steps to mark at the foot as not finite.
    """
    values = np.concatenate([v for s in series for v in (s.data.mean, s.data.low, s.data.high) if v is not None])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low = min(low, 0.0) if zero else low
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    x_values = np.concatenate([s.data.x for s in series])
    width, height = (WIDE_WIDTH, WIDE_HEIGHT) if wide else (WIDTH, HEIGHT)
    x_range, y_range = (float(x_values.min()), float(x_values.max())), (low if zero else low - margin, high + margin)
    frame = Frame(x_range, y_range, width, height)
    y_ticks = [t for t in ticks(frame.y0, frame.y1, 8 if wide else 5) if not whole or t == int(t)]
    x_ticks = [t for t in ticks(frame.x0, frame.x1, 7) if t == int(t)]
    parts = [frame.axes("step", y_label, x_ticks, y_ticks)]
    for s in series:
        x = frame.x(s.data.x)
        if s.data.low is not None:
            parts.append(f'<path class="band {s.style}" d="{_band(x, frame.y(s.data.low), frame.y(s.data.high))}"/>')
        y = frame.y(s.data.mean)
        parts.append(f'<path class="line {s.style}" d="{_path(x, y)}"/>')
        # A lone point draws no line.
        if s.markers or len(x) == 1:
            parts += [f'<circle class="dot {s.style}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in _points(x, y)]
    foot = height - BOTTOM
    for step in flags:
        x = frame.x(step)
        parts.append(
            f'<path class="flag" d="M{x:.1f} {foot}l-4 -8h8z"><title>step {step:.0f}: not finite</title></path>'
        )
    data = {
        "x0": frame.x0,
        "x1": frame.x1,
        "series": [{"name": s.name, "x": _numbers(s.data.x), "y": _numbers(s.data.mean)} for s in series],
    }
    return _svg("chart", frame, "".join(parts), data) + _legend(series)


def _points(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    return [(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True) if math.isfinite(b)]


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """An SVG path that is interrupted where y is not finite."""
    parts, command = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(b):
            parts.append(f"{command}{a:.1f} {b:.1f}")
            command = "L"
        else:
            command = "M"
    return "".join(parts)


def _band(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    ok = np.isfinite(low) & np.isfinite(high)
    if not ok.any():
        return ""
    x, low, high = x[ok], low[ok], high[ok]
    return _path(np.append(x, x[::-1]), np.append(high, low[::-1])) + "Z"


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def _svg(kind: str, frame: Frame, body: str, data: dict) -> str:
    plot = escape(json.dumps(data, separators=(",", ":")))
    return (
        f'<svg class="{kind}" viewBox="0 0 {frame.width} {frame.height}" data-plot="{plot}" role="img">'
        f'{body}<line class="cursor" y1="{TOP}" y2="{frame.height - BOTTOM}"/></svg>'
    )


def _legend(series: list[Series]) -> str:
    items = "".join(f'<span><i class="{s.style}"></i>{escape(s.name)}</span>' for s in series)
    return f'<div class="legend">{items}</div>' if len(series) > 1 else ""


# The heat map's palette. 0: nothing recorded; 1: no token; 2 .. 255: log2 of load / mean from -3 to 3.
LOG2_RANGE = 3.0
STOPS = ((0.0, "0b3c8c"), (0.25, "4b93d1"), (0.5, "f4f2ec"), (0.75, "f08a4b"), (1.0, "9d0d1f"))
DEAD = "6a1b9a"


def palette() -> np.ndarray:
    """RGB ``[256, 3]``."""
    at = [stop for stop, _ in STOPS]
    rgb = np.array([list(bytes.fromhex(color)) for _, color in STOPS], dtype=float)
    where = np.linspace(0, 1, 254)
    scale = np.stack([np.interp(where, at, rgb[:, channel]) for channel in range(3)], axis=1)
    return np.concatenate([np.zeros((1, 3)), [list(bytes.fromhex(DEAD))], scale]).round().astype(np.uint8)


def load_levels(tokens: np.ndarray) -> np.ndarray:
    """Palette index ``[experts, columns]`` of tokens ``[experts, columns]``, each against its column's mean."""
    mean = np.maximum(tokens.mean(axis=0, keepdims=True), 1e-9)
    ratio = np.log2(np.maximum(tokens, 1e-9) / mean)
    scaled = (ratio.clip(-LOG2_RANGE, LOG2_RANGE) + LOG2_RANGE) / (2 * LOG2_RANGE)
    levels = 2 + (scaled * 253).round()
    return np.select([tokens < 0, tokens == 0], [0, 1], levels).astype(np.uint8)


def png(levels: np.ndarray) -> bytes:
    """A palette image of ``levels`` (uint8 ``[rows, columns]``); level 0 is transparent."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows, columns = levels.shape
    # Each row starts with its filter, 0: none.
    pixels = np.concatenate([np.zeros((rows, 1), np.uint8), levels], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"PLTE", palette().tobytes())
        + chunk(b"tRNS", b"\x00")
        + chunk(b"IDAT", zlib.compress(pixels, 9))
        + chunk(b"IEND", b"")
    )


def heat_map(tokens: np.ndarray, first_step: int, width: int) -> str:
    """Experts down, steps across; the colour is an expert's tokens over the mean of its column."""
    experts, columns = tokens.shape
    height = TOP + BOTTOM + min(400, max(120, 12 * experts))
    last_step = first_step + columns * width
    frame = Frame((first_step, last_step), (experts, 0), WIDTH, height)
    image = base64.b64encode(png(load_levels(tokens))).decode()
    x_ticks = [t for t in ticks(first_step, last_step - 1, 7) if t == int(t)]
    y_ticks = [t for t in ticks(0, experts - 1, min(8, experts)) if t == int(t)]
    # Tick labels of experts sit in the middle of their rows.
    frame.y0, frame.y1 = experts - 0.5, -0.5
    body = frame.axes("step", "expert", x_ticks, y_ticks)
    box = f'x="{LEFT}" y="{TOP}" width="{frame.plot_width}" height="{frame.plot_height}"'
    body += f'<image {box} preserveAspectRatio="none" href="data:image/png;base64,{image}"/>'
    data = {"x0": first_step, "width": width, "experts": experts, "columns": columns}
    return _svg("heat", frame, body, data)


def heat_legend() -> str:
    """The colour scale of the heat maps."""
    stops = "".join(f'<stop offset="{at}" stop-color="#{color}"/>' for at, color in STOPS)
    labels = "".join(
        f'<text class="tick" text-anchor="middle" x="{130 + 260 * i / 6:.0f}" y="38">{text}</text>'
        for i, text in enumerate(("⅛", "¼", "½", "1", "2", "4", "8"))
    )
    return (
        '<svg class="scale" viewBox="0 0 600 46" role="img"><defs><linearGradient id="load">'
        f'{stops}</linearGradient></defs><rect x="130" y="8" width="260" height="14" fill="url(#load)"/>{labels}'
        f'<rect x="30" y="8" width="14" height="14" fill="#{DEAD}"/><text class="tick" x="50" y="20">no token</text>'
        '<text class="tick" x="404" y="20">tokens ÷ mean of the layer</text></svg>'
    )
