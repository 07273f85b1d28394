"""Who may import whom: a module imports from its own room and from the floors under it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "titan_moe"

FLOORS = {
    5: ("train", "cli", "launch", "doctor"),
    4: ("trainer", "rerun", "generate", "convert", "memory", "rl", "planner", "dry_run"),
    3: ("parallelize", "fsdp_ep", "float8", "plugins", "optim", "checkpoint", "data", "observe"),
    2: ("models", "hf"),
    1: ("moe",),
    0: ("kernels", "config", "errors", "distributed", "modules"),
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
# Rooms of one floor that may still know each other, in this direction.
NEIGHBOURS = {
    *(("cli", other) for other in ("train", "launch", "doctor")),
    ("launch", "train"),
    ("generate", "trainer"),
    ("trainer", "planner"),
    ("trainer", "rerun"),
    ("planner", "dry_run"),
    ("memory", "planner"),
    ("memory", "dry_run"),
    ("hf", "models"),
    ("parallelize", "fsdp_ep"),
    *((room, "errors") for room in ("kernels", "config", "distributed")),
}
OPTIONAL = {"transformer_engine", "deep_ep", "transformers", "datasets", "pyarrow", "wandb", "matplotlib"}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree: ast.AST) -> list[tuple[str, list[str]]]:
    """``(module, names)`` of every import under ``tree``, those inside functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.append((node.module, [alias.name for alias in node.names]))
    return found


def rooms_imported(path: Path) -> set[str]:
    rooms = set()
    for module, names in imports(ast.parse(path.read_text())):
        first, *rest = module.split(".")
        if first == "titan_moe":
            rooms |= {rest[0]} if rest else {name for name in names if name in FLOOR}
    return rooms


def forbidden(room: str, other: str) -> bool:
    return other != room and (room, other) not in NEIGHBOURS and FLOOR[other] >= FLOOR[room]


def test_every_room_has_a_floor():
    rooms = {room_of(path) for path in FILES} - {"__init__"}
    assert rooms <= FLOOR.keys(), f"no floor: {sorted(rooms - FLOOR.keys())}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_floors_under_it(path):
    room = room_of(path)
    if room == "__init__":
        # The package itself loads nothing: its names are resolved on first use.
        assert not rooms_imported(path)
        return
    wrong = sorted(other for other in rooms_imported(path) if forbidden(room, other))
    assert not wrong, f"{room} (floor {FLOOR[room]}) imports {wrong}"


def test_the_rule_itself():
    assert forbidden("moe", "models") and forbidden("config", "data") and forbidden("optim", "data")
    assert not forbidden("models", "moe") and not forbidden("hf", "models") and forbidden("models", "hf")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_are_imported_where_they_are_used(path):
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    at_import = [
        node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside
    ]
    modules = {module.split(".")[0] for node in at_import for module, _ in imports(node)}
    assert not modules & OPTIONAL


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_imports_another_rooms_private_names(path):
    for module, names in imports(ast.parse(path.read_text())):
        if module.startswith("titan_moe"):
            private = [name for name in [*module.split("."), *names] if name.startswith("_") and name != "__version__"]
            assert not private, f"{module}: {private}"


def test_the_command_line_configs_and_checks_import_without_torch():
    program = (
        "import sys, titan_moe, titan_moe.config, titan_moe.cli, titan_moe.launch, titan_moe.train\n"
        "import titan_moe.models, titan_moe.parallelize.check, titan_moe.parallelize.stages\n"
        "assert 'torch' not in sys.modules and 'tyro' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
