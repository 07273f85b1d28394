"""``metrics.jsonl``: one JSON object per line, written so that a killed run loses at most the last one.

Numbers are in full ``repr`` precision. JSON has no NaN and no infinity: they become ``null``, and the object
gets ``"nonfinite": true``.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_moe.errors import DataError

FILE_NAME = "metrics.jsonl"
CONFIG_NAME = "config.toml"


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each complete object with its raw line.

    A last line without its line feed, or that does not parse, was torn by a kill and is left out.

    Raises:
        DataError: on any other line that is not a JSON object with a ``step``.
    """
    with open(path, "rb") as file:
        bad = None
        for number, line in enumerate(file, 1):
            if bad is not None:
                raise DataError(f"{path}, line {bad}: not a metrics object. Repair or remove the line.")
            try:
                record = json.loads(line)
                torn = not line.endswith(b"\n") or not isinstance(record["step"], int)
            except (ValueError, TypeError, KeyError):
                torn = True
            if torn:
                bad = number
            else:
                yield record, line


def encode(record: dict[str, Any]) -> str:
    """One line for ``record``, whose values that are not finite become null and are flagged."""
    finite, flagged = _finite(record)
    if flagged:
        finite["nonfinite"] = True
    return json.dumps(finite, allow_nan=False) + "\n"


def _finite(value: Any) -> tuple[Any, bool]:
    if isinstance(value, dict):
        pairs = {key: _finite(item) for key, item in value.items()}
        return {key: pair[0] for key, pair in pairs.items()}, any(pair[1] for pair in pairs.values())
    if isinstance(value, float) and not math.isfinite(value):
        return None, True
    return value, False


def start_file(folder: Path, resume_step: int) -> Path:
    """Make ``metrics.jsonl`` ready for appending and return its path.

    A resumed run keeps the lines up to ``resume_step``: what was trained after the checkpoint will be trained
    again. The shortened file is written aside and renamed. A fresh run (``resume_step`` 0) moves an older file
    to ``metrics.N.jsonl``.
    """
    path = folder / FILE_NAME
    if not path.exists() or path.stat().st_size == 0:
        return path
    if resume_step == 0:
        number = 1
        while (aside := folder / f"metrics.{number}.jsonl").exists():
            number += 1
        path.rename(aside)
        return path
    shortened = folder / (FILE_NAME + ".tmp")
    with open(shortened, "wb") as file:
        file.writelines(line for record, line in read_lines(path) if record["step"] <= resume_step)
        file.flush()
        os.fsync(file.fileno())
    shortened.replace(path)
    return path
