"""The page in headless Chromium: equal numbers, pictures, keyboard, a narrow window, no network."""

import json
import random
import struct
import zlib
from dataclasses import asdict

import pytest
from browser import CHROMIUM, Browser
from choices import as_request, random_choice, shape, system
from published import GB200_LAYOUT

from titan_moe.errors import ConfigError
from titan_moe.planner.command import Flags, config_of, options_of
from titan_moe.planner.page import page
from titan_moe.planner.predict import predict
from titan_moe.planner.run import plan_of
from titan_moe.planner.systems import system_of

pytestmark = pytest.mark.slow
FLAGS = Flags(
    model="deepseek_v3_671b",
    system="gb200",
    gpus=256,
    pp=4,
    vpp=4,
    ep=64,
    gbs=8192,
    pp_layout=GB200_LAYOUT,
    precision="mxfp8",
    dispatcher="hybridep",
    recompute=["mlp"],
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("the page needs a browser: put Chromium or Chrome on the PATH")
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    y = system_of(FLAGS.system)
    s, run = plan_of(config_of(FLAGS), FLAGS.gpus, options_of(FLAGS), y)
    path = tmp_path / "plan.html"
    path.write_text(page(FLAGS, run, y), encoding="utf-8")
    browser.resize(1300, 1600)
    browser.open(path)
    return browser, predict(s, run, y)


def pixels(png: bytes) -> tuple[int, int, int]:
    """Width, height and number of distinct colours of a PNG, sampled."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    data, at = b"", 8
    while at < len(png):
        size, name = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        at += size + 12
    each = {2: 3, 6: 4}[kind]
    raw = zlib.decompress(data)
    return width, height, len({raw[i : i + each] for i in range(1, len(raw) - each, 101)})


def test_the_page_says_what_the_command_says(opened):
    browser, result = opened
    summary = browser.evaluate("document.getElementById('summary').textContent")
    assert f"{result['tflops_per_gpu']:.0f} TFLOPS" in summary
    assert f"{result['tokens_per_s_per_gpu']:.0f} tokens" in summary
    worst = result["ranks"][result["rank"]]["total"]
    assert f"rank {result['rank']} needs {worst:.1f}" in summary
    # The layout string holds on the page too.
    assert "embedding, layers 0\u20133" in browser.evaluate("document.getElementById('stages').textContent")


def test_200_random_runs_are_equal_to_the_commands(opened):
    browser, _ = opened
    rng, cases = random.Random(7), []
    while len(cases) < 200:
        choice = random_choice(rng)
        y = system(choice)
        config, options = as_request(choice)
        try:
            s, run = plan_of(config, choice["gpus"], options, y)
        except ConfigError:
            continue
        values = {name: value for name, value in choice.items() if name not in ("mtp",)}
        expected = predict(s, run, y)
        cases.append((asdict(shape(choice)), asdict(y), values, expected))
    browser.evaluate(
        "function planned_case(s, y, c) { const why = refusal(s, y, c); if (why !== '') return {why};"
        " const r = predict(s, compose(s, c, even_stages(s, c.pp, c.vpp)), y);"
        " delete r.orders; delete r.starts; return r; }"
    )
    for s, y, values, expected in cases:
        arguments = ", ".join(json.dumps(part) for part in (s, y, values))
        found = browser.evaluate(f"planned_case({arguments})")
        close(found, {name: value for name, value in expected.items() if name not in ("orders", "starts")}, values)


def close(found, expected, where):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            close(found[name], expected[name], (name, where))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for a, b in zip(found, expected, strict=True):
            close(a, b, where)
    elif isinstance(expected, float):
        # The same operations in the same order; only powers and logarithms may differ in the last digit.
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-300), where
    else:
        assert found == expected, where


def test_it_draws_memory_time_pipeline_and_folding(opened):
    browser, result = opened
    width, height, colours = pixels(browser.screenshot())
    assert (width, height) == (1300, 1600) and colours > 40
    rects = browser.evaluate("document.querySelectorAll('#memory svg rect').length")
    assert rects == 4 * 5
    # The bar of a rank is as long as its total against the limit's line.
    drawn = browser.evaluate(
        "[...document.querySelectorAll('#memory svg rect')].slice(0, 5)"
        ".reduce((a, r) => a + +r.getAttribute('width'), 0)"
        " / (document.querySelector('#memory svg line').getAttribute('x1') - 62)"
    )
    assert drawn == pytest.approx(result["ranks"][0]["total"] / result["limit_gib"], rel=1e-6)
    assert browser.evaluate("document.querySelectorAll('#ranks div').length") == 64
    assert "bubble" in browser.evaluate("document.getElementById('timeline').getAttribute('aria-label')")


def test_it_is_used_by_keyboard_alone(opened):
    browser, _ = opened
    before = browser.evaluate("document.getElementById('summary').textContent")
    for _ in range(40):
        browser.key("Tab")
        if browser.evaluate("document.activeElement.id") == "pp":
            break
    assert browser.evaluate("document.activeElement.id") == "pp"
    for _ in range(2):
        browser.key("ArrowLeft")
    assert browser.evaluate("choice.pp") == 2
    after = browser.evaluate("document.getElementById('summary').textContent")
    assert after != before and "TFLOPS" in after
    assert browser.evaluate("document.getElementById('pp').getAttribute('aria-valuetext')") == "2"
    while browser.evaluate("document.activeElement.id") != "recompute-layernorm":
        browser.key("Tab")
    browser.key(" ")
    assert "layernorm" in browser.evaluate("choice.recompute")
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    # Every control has a name of its own.
    assert browser.evaluate("[...document.querySelectorAll('input, select')].every((x) => x.labels.length === 1)")


def test_an_illegal_choice_is_refused_in_words_and_comes_back(opened):
    browser, _ = opened
    browser.evaluate("choice.pp = 3; layoutChanged('pp')")
    assert "PP does not divide the GPUs" in browser.evaluate("document.getElementById('summary').textContent")
    assert browser.evaluate("document.getElementById('results').hidden")
    browser.evaluate("choice.pp = 4; layoutChanged('pp')")
    assert not browser.evaluate("document.getElementById('results').hidden")


def test_a_narrow_window_loses_nothing(opened):
    browser, _ = opened
    browser.resize(360, 740)
    browser.evaluate("update()")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    form, results = (
        browser.evaluate(f"document.getElementById('{name}').getBoundingClientRect().bottom + scrollY")
        for name in ("controls", "summary")
    )
    assert results > form
    width, height, colours = pixels(browser.screenshot())
    assert (width, height) == (360, 740) and colours > 5


def test_it_needs_no_network(opened):
    browser, _ = opened
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0
