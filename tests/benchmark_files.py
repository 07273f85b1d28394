"""The programs under ``benchmarks/``, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_benchmark(name: str) -> ModuleType:
    """Under a name of its own: tests have modules of the same names, and their folder is not to be on the path."""
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{name}", Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
