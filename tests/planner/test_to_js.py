"""The translation: refuses what it cannot do, and keeps Python's meaning where the two languages differ."""

import ast

import pytest

from titan_moe.planner import to_js


def expression(text: str) -> str:
    return to_js.expression(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("python", "javascript"),
    [
        ("-(-a // b)", "(-Math.floor((-a) / b))"),
        ("a in b", "$has(b, a)"),
        ("a == b and not c", "((a === b) && (!c))"),
        ("[x * 2 for x in y if x > 1]", "$each(y).filter((x) => (x > 1)).map((x) => ((x * 2)))"),
        ("[{} for x in y]", "$each(y).map((x) => ({}))"),
        ("None if a else True", "(a ? null : true)"),
    ],
)
def test_expressions(python, javascript):
    assert expression(python) == javascript


@pytest.mark.parametrize("python", ["a[-1]", "a[1:2]", "f(x=1)", "f'{a}'", "a < b < c", "lambda: 1", "{**a}"])
def test_what_has_no_translation_is_refused(python):
    with pytest.raises((AssertionError, ValueError)):
        expression(python)


def test_every_formula_module_is_translated_once():
    script = to_js.formulas()
    for name in ("predict", "rank_memory", "simulate", "layer_rows", "exchange", "refusal", "training_flops"):
        assert script.count(f"function {name}(") == 1
    assert "shape_of" not in script
