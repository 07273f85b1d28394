import base64
import json
import math
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from titan_moe.errors import DataError
from titan_moe.observe import write_report
from titan_moe.observe.charts import DEAD, STOPS, load_levels, palette, png, short, ticks
from titan_moe.observe.history import LoadBins, read_history, subsample


def layer(name: str, load: list[int], **changes) -> dict:
    figures = {
        "layer": name,
        "max_over_mean": max(load) * len(load) / (sum(load) or 1),
        "dead_experts": load.count(0),
        "dropped": 0.0,
        "aux_loss": 0.0,
        "z_loss": 0.0,
        "bias_min": None,
        "bias_max": None,
        "load": load,
    }
    return figures | changes


def line(step: int, **changes) -> dict:
    numbers = {"loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64 * step, "tps": 100.0 * step}
    return {"step": step} | numbers | {"tflops": 0.5, "mfu": None, "memory_gib": 0.25} | changes


def write(folder: Path, records: list[dict], tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


def parse(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def card(page: ElementTree.Element, title: str) -> ElementTree.Element:
    return next(div for div in page.iter("div") if (h3 := div.find("h3")) is not None and h3.text == title)


def plot(page: ElementTree.Element, title: str) -> dict:
    return json.loads(card(page, title).find("svg").get("data-plot"))


def words(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def image(page: ElementTree.Element, title: str) -> tuple[np.ndarray, np.ndarray]:
    """Palette indices and RGBA palette of a heat map's PNG, which has no row filters."""
    href = card(page, title).find("svg/image").get("href")
    data = base64.b64decode(href.removeprefix("data:image/png;base64,"))
    chunks, at = {}, 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        chunks[kind] = body
        at += 12 + size
    columns, rows = struct.unpack(">II", chunks[b"IHDR"][:8])
    pixels = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(rows, columns + 1)
    assert not pixels[:, 0].any()
    return pixels[:, 1:], np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)


def test_the_report_is_one_well_formed_file_without_links(tmp_path):
    records = [line(s, moe=[layer("layers.0.mlp", [s, 2, 0])]) for s in range(1, 6)]
    path = write_report(write(tmp_path, records))
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    page = parse(path)
    assert not re.search(r"https?:|url\((?!#)|@import|<link|src=", text)
    assert all(e.get("href").startswith("data:") for e in page.iter() if e.get("href"))


def test_a_report_does_not_wait_for_torch(tmp_path):
    write(tmp_path, [line(1)])
    code = f"import sys; from titan_moe.observe import write_report; write_report({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0


def test_curves_hold_the_run(tmp_path):
    records = [line(s) for s in range(1, 6)]
    records.insert(3, {"step": 3, "val_loss": 2.5, "val_loss_per_byte": 1.25})
    page = parse(write_report(write(tmp_path, records)))
    training, validation = plot(page, "Loss")["series"]
    assert training["x"] == [1, 2, 3, 4, 5]
    assert training["y"] == pytest.approx([5.0 / s for s in range(1, 6)], rel=1e-5)
    assert (validation["x"], validation["y"]) == ([3], [2.5])
    assert plot(page, "Throughput")["series"][0]["y"] == [100, 200, 300, 400, 500]
    for title, label in (
        ("Loss", "loss (nats per token)"),
        ("Validation loss per byte", "loss (nats per byte)"),
        ("Learning rate", "learning rate"),
        ("Gradient norm", "norm before clipping"),
        ("Throughput", "tokens per second"),
        ("Peak memory", "GiB"),
    ):
        assert label in words(card(page, title)) and "step" in words(card(page, title))


def test_a_curve_is_drawn_to_scale(tmp_path):
    page = parse(write_report(write(tmp_path, [line(2), line(4), line(5)])))
    svg = card(page, "Throughput").find("svg")
    path = next(p.get("d") for p in svg.iter("path") if p.get("class") == "line a")
    points = np.array([[float(v) for v in pair.split()] for pair in re.split("[ML]", path)[1:]])
    grid = [e for e in svg.iter("line") if e.get("class") == "grid"]
    labels = [e for e in svg.iter("text") if e.get("text-anchor") == "end"]
    at = {label.text: float(tick.get("y1")) for label, tick in zip(labels, grid, strict=True)}
    # 200 and 400 tokens per second are ticks; step 4 is two thirds of the way from 2 to 5.
    assert (points[0, 1], points[1, 1]) == pytest.approx((at["200"], at["400"]), abs=0.1)
    assert points[1, 0] == pytest.approx(points[0, 0] + (points[2, 0] - points[0, 0]) * 2 / 3, abs=0.1)


def test_steps_that_are_not_finite_break_the_curve_and_are_marked(tmp_path):
    records = [line(1), line(2), line(3, loss=None, nonfinite=True), line(4), line(5)]
    page = parse(write_report(write(tmp_path, records)))
    svg = card(page, "Loss").find("svg")
    assert next(p.get("d") for p in svg.iter("path") if p.get("class") == "line a").count("M") == 2
    assert [t.text for t in svg.iter("title")] == ["step 3: not finite"]
    assert plot(page, "Loss")["series"][0]["y"][2] is None
    assert "1 steps not finite" in words(page)


def test_a_run_that_never_was_finite_still_gets_a_report(tmp_path):
    records = [line(s, loss=None, grad_norm=None, nonfinite=True) for s in (1, 2)]
    assert "2 steps not finite" in words(parse(write_report(write(tmp_path, records))))


def test_a_single_step_is_a_dot(tmp_path):
    page = parse(write_report(write(tmp_path, [line(1)])))
    assert len(list(card(page, "Loss").iter("circle"))) == 1


def test_final_figures_and_layers(tmp_path):
    moe = [
        layer("layers.1.mlp", [4, 0, 0, 0], dropped=0.125, bias_min=-0.5, bias_max=0.25),
        layer("layers.2.mlp", [1] * 4),
    ]
    records = [line(1), {"step": 1, "val_loss": 1.0}, line(2, moe=moe), {"step": 2, "val_loss": 2.0}]
    page = parse(write_report(write(tmp_path, records)))
    tiles = words(next(d for d in page.iter("div") if d.get("class") == "tiles"))
    for text in (
        "2 steps",
        "128 tokens",
        "2.5000 training loss",
        "2.0000 validation loss",
        "1.0000 best validation loss, at step 1",
    ):
        assert text in tiles
    rows = [[cell.text for cell in row] for row in page.iter("tr")]
    assert rows[1:] == [
        ["layers.1.mlp", "4.000", "3", "12.50%", "0", "-0.5", "0.25"],
        ["layers.2.mlp", "1.000", "0", "0.00%", "0", "none", "none"],
    ]
    assert plot(page, "Dead experts")["series"][0]["y"] == [None, 3]
    assert plot(page, "Load imbalance")["series"][0]["y"] == [None, 4]
    assert plot(page, "Dropped")["series"][0]["y"] == [None, 0.0625]


def test_heat_map_shows_each_expert_against_its_steps_mean(tmp_path):
    # Means 4, 8 and 1.
    loads = [[4, 8, 2, 2], [0, 32, 0, 0], [1, 1, 1, 1]]
    records = [line(s, moe=[layer("layers.3.mlp", load)]) for s, load in enumerate(loads, 1)]
    page = parse(write_report(write(tmp_path, records)))
    levels, colors = image(page, "layers.3.mlp")
    # The scale has 254 levels from 1/8 to 8 times the mean; level 2 + 253 (log2(ratio) + 3) / 6, rounded.
    level = {ratio: 2 + round(253 * (math.log2(ratio) + 3) / 6) for ratio in (0.5, 1, 2, 4)}
    assert levels.T.tolist() == [
        [level[1], level[2], level[0.5], level[0.5]],
        [1, level[4], 1, 1],
        [level[1]] * 4,
    ]
    assert colors[1].tobytes().hex() == DEAD
    assert (colors[2].tobytes().hex(), colors[255].tobytes().hex()) == (STOPS[0][1], STOPS[-1][1])
    assert plot(page, "layers.3.mlp") == {"x0": 1, "width": 1, "experts": 4, "columns": 3}
    assert "expert" in words(card(page, "layers.3.mlp"))


def test_unrecorded_columns_are_transparent():
    levels = load_levels(np.array([[-1, 3], [-1, 3]]))
    assert levels[:, 0].tolist() == [0, 0]
    assert b"tRNS\x00" in png(levels)
    assert palette().shape == (256, 3)


def test_load_bins_sum_the_steps_they_cover():
    bins = LoadBins(max_columns=3)
    for step in range(1, 11):
        bins.add(step, [step, 100])
    # More than 3 bins at width 1 and 2, so width 4: steps 1-4, 5-8, 9-10.
    tokens, first, width = bins.matrix()
    assert (first, width) == (1, 4)
    assert tokens.tolist() == [[1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9 + 10], [400, 400, 200]]


def test_load_bins_of_a_resumed_fragment_start_where_it_starts():
    bins = LoadBins()
    for step in (7, 8, 10):
        bins.add(step, [step])
    tokens, first, width = bins.matrix()
    assert (first, width, tokens.tolist()) == (7, 1, [[7, 8, -1, 10]])


def test_load_recorded_every_tenth_step_leaves_no_gaps():
    bins = LoadBins()
    for step in (1, 10, 20, 30, 40):
        bins.add(step, [step])
    tokens, first, width = bins.matrix()
    assert (first, width, tokens.tolist()) == (1, 10, [[11, 20, 30, 40]])


def test_subsampling_keeps_every_spike_and_the_mean():
    x = np.arange(1.0, 10_001.0)
    y = np.zeros(10_000)
    y[1234], y[8000] = 99.0, -7.0
    y[5000:5100] = np.nan
    curve = subsample(x, y, max_points=100)
    assert len(curve.x) == 100
    assert (curve.high[12], curve.low[80], curve.mean[12]) == (99.0, -7.0, 0.99)
    assert (curve.x[0], curve.x[99]) == (50.5, 9950.5)
    assert np.isnan(curve.mean[50]) and np.isfinite(curve.mean[[49, 51]]).all()


def test_a_long_run_gives_a_small_file_and_keeps_its_spike(tmp_path):
    moe = [layer(f"layers.{i}.mlp", list(range(1, 65))) for i in range(4)]
    records = [line(s, loss=40.0 if s == 4567 else 1.0, moe=moe) for s in range(1, 8001)]
    path = write_report(write(tmp_path, records))
    assert path.stat().st_size < 1_000_000
    svg = card(parse(path), "Loss").find("svg")
    band = next(p.get("d") for p in svg.iter("path") if p.get("class") == "band a")
    top = min(float(pair.split()[1].rstrip("Z")) for pair in re.split("[ML]", band)[1:])
    # The y axis ends 6% above the spike, in a plot that is 302 pixels high and starts 14 from the top.
    assert top == pytest.approx(14 + 302 * 0.06 / 1.12, abs=1)


def test_configuration_is_shown_and_escaped(tmp_path):
    folder = write(tmp_path, [line(1)])
    (folder / "config.toml").write_text(
        '[job]\ndescription = "a <b> & c"\n'
        '[model]\nname = "mixtral"\nflavor = "debug"\n[optimizer]\nlr = 0.5\nbeta1 = 0.9\n'
    )
    page = parse(write_report(folder))
    assert page.find(".//h1").text == "mixtral debug"
    assert "a <b> & c" in words(page)
    config = next(d for d in page.iter("div") if d.get("class") == "card config")
    changed = [words(d) for d in config.iter("div") if d.get("class") == "set"]
    assert changed == ["description a <b> & c", "name mixtral", "lr 0.5"]


@pytest.mark.parametrize("tail", ['{"step": 2, "loss": 1.', '{"step": 2', '{"step": 2, "loss": 1.0}'])
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    assert len(read_history(write(tmp_path, [line(1)], tail)).steps) == 1
    assert "1 steps" in words(parse(write_report(tmp_path)))


def test_bad_input_is_one_readable_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "none").mkdir()
    broken = write(tmp_path / "broken", [line(1)], 'oops\n{"step": 2}\n')
    changed = write(tmp_path / "changed", [line(s, moe=[layer("a", [1] * (s + 1))]) for s in (1, 1)])
    (changed / "metrics.jsonl").write_text(
        "".join(json.dumps(line(1, moe=[layer("a", [1] * n)])) + "\n" for n in (2, 3))
    )
    toml = write(tmp_path / "toml", [line(1)])
    (toml / "config.toml").write_text("[job")
    for folder, message in (
        (tmp_path / "missing", "is not a folder"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "none", "holds no metrics.jsonl"),
        (write(tmp_path / "empty", []), "holds no complete step yet"),
        (write(tmp_path / "torn", [], '{"step": 1'), "holds no complete step yet"),
        (broken, "line 2: not a metrics object"),
        (changed, "number of experts changes from 2 to 3"),
        (toml, "config.toml cannot be read as TOML"),
    ):
        with pytest.raises(DataError, match=message) as error:
            write_report(folder)
        assert "\n" not in str(error.value)
    (toml / "config.toml").unlink()
    (toml / "report.html").mkdir()
    with pytest.raises(DataError, match=r"report.html cannot be written"):
        write_report(toml)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.97, 1.03, [0.98, 1.0, 1.02]), (3, 3, [3.0]), (-1, 1, [-1.0, -0.5, 0, 0.5, 1.0])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_axis_numbers_are_short():
    numbers = [0, 1500, 2_000_000, 3.2e9, 0.00025, -0.001, 0.25]
    assert [short(n) for n in numbers] == ["0", "1.5k", "2M", "3.2G", "2.5e-4", "-1e-3", "0.25"]
