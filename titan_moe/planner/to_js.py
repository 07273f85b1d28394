"""The formulas as JavaScript: one source for the command and for the page.

The formula modules keep to a small part of Python: functions of positional arguments, numbers, strings, lists and
dicts with constant keys, attributes of the inputs, loops, comprehensions of one generator. ``a in b`` and loops over
dicts go through helpers; everything else has a direct counterpart. What is outside this part is an assertion.
"""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

MODULES = (
    "titan_moe.models.count",
    "titan_moe.planner.schedules",
    "titan_moe.planner.rows",
    "titan_moe.planner.own_activations",
    "titan_moe.planner.activations",
    "titan_moe.planner.parameters",
    "titan_moe.planner.memory",
    "titan_moe.planner.collectives",
    "titan_moe.planner.costs",
    "titan_moe.planner.predict",
    "titan_moe.planner.compose",
)
SKIPPED = ("shape_of",)
"""Functions that read the project's own objects; the page gets their results as data."""

HELPERS = """
const len = (x) => (Array.isArray(x) || typeof x === "string" ? x.length : Object.keys(x).length);
const $each = (x) => (Array.isArray(x) || typeof x === "string" ? x : Object.keys(x));
const $has = (x, y) => (Array.isArray(x) || typeof x === "string" ? x.includes(y) : y in x);
const list = (x) => [...x];
const str = (x) => String(x);
const abs = Math.abs, log2 = Math.log2;
const max = (...x) => Math.max(...(x.length === 1 ? x[0] : x));
const min = (...x) => Math.min(...(x.length === 1 ? x[0] : x));
function range(a, b) {
  const out = [];
  for (let i = b === undefined ? 0 : a; i < (b === undefined ? a : b); i += 1) out.push(i);
  return out;
}
function comb(n, k) {
  let out = k < 0 || k > n ? 0 : 1;
  for (let i = 0; i < k; i += 1) out = (out * (n - i)) / (i + 1);
  return out;
}
"""

_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%", ast.Pow: "**"}
_COMPARE = {ast.Eq: "===", ast.NotEq: "!==", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_METHODS = {"append": "push({})", "extend": "push(...{})"}


def formulas() -> str:
    """All formula modules as one script."""
    parts, names = [HELPERS], set()
    for module in MODULES:
        for node in ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name not in SKIPPED:
                assert node.name not in names, f"two formulas are called {node.name}"
                names.add(node.name)
                parts.append(_function(node))
            elif isinstance(node, ast.Assign):
                (target,) = node.targets
                # A constant that two modules share is the same in both.
                if target.id not in names:
                    names.add(target.id)
                    parts.append(f"const {target.id} = {expression(node.value)};")
    return "\n".join(parts)


def _function(node: ast.FunctionDef) -> str:
    arguments = [argument.arg for argument in node.args.args]
    assert not (node.args.defaults or node.args.kwonlyargs), f"{node.name}: only positional arguments"
    body = node.body[1:] if ast.get_docstring(node) else node.body
    comprehended = {
        id(name)
        for inner in ast.walk(node)
        if isinstance(inner, ast.ListComp)
        for name in ast.walk(inner.generators[0].target)
    }
    stored = {
        inner.id: None
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store) and id(inner) not in comprehended
    }
    local = [name for name in stored if name not in arguments]
    declared = f"let {', '.join(local)};\n" if local else ""
    return f"function {node.name}({', '.join(arguments)}) {{\n{declared}{_block(body)}\n}}"


def _block(body: list[ast.stmt]) -> str:
    return "\n".join(_statement(node) for node in body)


def _statement(node: ast.stmt) -> str:
    match node:
        case ast.Assign(targets=[ast.Name() | ast.Subscript() as target], value=value):
            return f"{expression(target)} = {expression(value)};"
        case ast.AugAssign(target=target, op=op, value=value):
            return f"{expression(target)} {_BINARY[type(op)]}= {expression(value)};"
        case ast.Return(value=value):
            return f"return {expression(value)};"
        case ast.If(test=test, body=body, orelse=orelse):
            other = f" else {{\n{_block(orelse)}\n}}" if orelse else ""
            return f"if ({expression(test)}) {{\n{_block(body)}\n}}{other}"
        case ast.For(target=ast.Name(id=name), iter=source, body=body, orelse=[]):
            return f"for ({name} of $each({expression(source)})) {{\n{_block(body)}\n}}"
        case ast.While(test=test, body=body, orelse=[]):
            return f"while ({expression(test)}) {{\n{_block(body)}\n}}"
        case ast.Expr(value=value):
            return f"{expression(value)};"
        case ast.Break():
            return "break;"
        case ast.Continue():
            return "continue;"
    raise AssertionError(f"line {node.lineno}: {type(node).__name__} has no translation")


def expression(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=bool() | str() | int() | float() | None as value):
            return json.dumps(value)
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{expression(value)}.{name}"
        case ast.Subscript(value=value, slice=index):
            assert not isinstance(index, ast.Slice | ast.UnaryOp), f"line {node.lineno}: slices and negative indices"
            return f"{expression(value)}[{expression(index)}]"
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return f"Math.floor({expression(left)} / {expression(right)})"
        case ast.BinOp(left=left, op=op, right=right):
            return f"({expression(left)} {_BINARY[type(op)]} {expression(right)})"
        case ast.UnaryOp(op=ast.USub(), operand=value):
            return f"(-{expression(value)})"
        case ast.UnaryOp(op=ast.Not(), operand=value):
            return f"(!{expression(value)})"
        case ast.BoolOp(op=op, values=values):
            sign = " && " if isinstance(op, ast.And) else " || "
            return f"({sign.join(expression(value) for value in values)})"
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[right]):
            sign = "" if isinstance(op, ast.In) else "!"
            return f"{sign}$has({expression(right)}, {expression(left)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"({expression(left)} {_COMPARE[type(op)]} {expression(right)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({expression(test)} ? {expression(body)} : {expression(orelse)})"
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[argument], keywords=[]):
            return f"{expression(value)}.{_METHODS[name].format(expression(argument))}"
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return f"{name}({', '.join(expression(argument) for argument in arguments)})"
        case ast.List(elts=elements):
            return f"[{', '.join(expression(element) for element in elements)}]"
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return f"{{{', '.join(f'{expression(key)}: {expression(value)}' for key, value in pairs)}}}"
        case ast.ListComp(elt=element, generators=[ast.comprehension(target=ast.Name(id=name), iter=source, ifs=ifs)]):
            kept = "".join(f".filter(({name}) => {expression(test)})" for test in ifs)
            return f"$each({expression(source)}){kept}.map(({name}) => ({expression(element)}))"
    raise AssertionError(f"line {node.lineno}: {ast.unparse(node)!r} has no translation")
