"""Reads ``metrics.jsonl`` of a run of any length into a bounded amount of memory per metric."""

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.errors import DataError
from titan_moe.observe.jsonl import FILE_NAME, read_lines

MAX_COLUMNS = 200
NAN = float("nan")


class Columns:
    """Numbers by name and step; a number that a step lacks is NaN."""

    def __init__(self) -> None:
        self.columns: dict[str, array] = {"step": array("d")}

    def append(self, record: dict[str, Any]) -> None:
        """Add one step. What is not a number is left out."""
        rows = len(self.columns["step"])
        for key in record.keys() - self.columns.keys():
            self.columns[key] = array("d", [NAN]) * rows
        for key, column in self.columns.items():
            value = record.get(key)
            column.append(value if isinstance(value, int | float) else NAN)

    def __getitem__(self, key: str) -> np.ndarray:
        column = self.columns.get(key)
        return np.full(len(self), NAN) if column is None else np.asarray(column)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def has(self, key: str) -> bool:
        """Whether any step has this number."""
        return bool(np.isfinite(self[key]).any())


class LoadBins:
    """Tokens per expert, summed over bins of steps that double in width so that few are kept.

    Bin b covers the steps ``b * width + 1 .. (b + 1) * width``.
    """

    def __init__(self, max_columns: int = MAX_COLUMNS) -> None:
        self.max_columns = max_columns
        self.width = 1
        self.bins: dict[int, np.ndarray] = {}

    def add(self, step: int, load: list[int]) -> None:
        """Add the load of one step."""
        self._add((step - 1) // self.width, np.asarray(load, dtype=np.int64))
        while len(self.bins) > self.max_columns:
            self._widen(2)

    def _add(self, index: int, load: np.ndarray) -> None:
        held = self.bins.get(index)
        if held is not None and len(held) != len(load):
            raise DataError(f"The number of experts changes from {len(held)} to {len(load)} within the run.")
        self.bins[index] = load if held is None else held + load

    def _widen(self, factor: int) -> None:
        old, self.bins = self.bins, {}
        self.width *= factor
        for index, load in old.items():
            self._add(index // factor, load)

    def matrix(self) -> tuple[np.ndarray, int, int]:
        """Tokens ``[experts, columns]`` (-1 where nothing was recorded), the first column's first step, the width."""
        # Where only every n-th step was recorded, bins of n steps leave no gaps.
        gaps = np.diff(sorted(self.bins))
        if len(gaps) and (factor := int(np.median(gaps))) > 1:
            self._widen(factor)
        first, last = min(self.bins), max(self.bins)
        experts = len(self.bins[first])
        tokens = np.full((experts, last - first + 1), -1, dtype=np.int64)
        for index, load in self.bins.items():
            tokens[:, index - first] = load
        return tokens, first * self.width + 1, self.width


@dataclass
class History:
    """A run so far."""

    steps: Columns = field(default_factory=Columns)
    validation: Columns = field(default_factory=Columns)
    loads: dict[str, LoadBins] = field(default_factory=dict)
    """Per layer."""
    last_moe: list[dict[str, Any]] = field(default_factory=list)
    """The ``moe`` list of the last step."""


def read_history(folder: Path) -> History:
    """Read the run in ``folder``. A torn last line is left out.

    Raises:
        DataError: when there is no such folder, no metrics file, nothing in it, or a broken line.
    """
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give the job.dump_folder of a run.")
    if not path.is_file():
        raise DataError(f"{folder} holds no {FILE_NAME}. Give the job.dump_folder of a run.")
    history = History()
    try:
        for record, _ in read_lines(path):
            if "val_loss" in record:
                history.validation.append(record)
                continue
            layers = record.pop("moe", [])
            history.steps.append(record | _over_layers(layers))
            for layer in layers:
                if "load" in layer:
                    history.loads.setdefault(layer["layer"], LoadBins()).add(record["step"], layer["load"])
            if layers:
                history.last_moe = layers
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    if not len(history.steps):
        raise DataError(f"{path} holds no complete step yet. Wait for the run's first step.")
    return history


def _over_layers(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of a step over all its layers."""
    if not layers:
        return {}
    imbalance = [layer["max_over_mean"] for layer in layers]
    return {
        "imbalance_worst": max(imbalance),
        "imbalance_mean": sum(imbalance) / len(layers),
        "dead_experts": sum(layer["dead_experts"] for layer in layers),
        "dropped": sum(layer["dropped"] for layer in layers) / len(layers),
        "aux_loss": sum(layer["aux_loss"] or 0.0 for layer in layers),
        "z_loss": sum(layer["z_loss"] or 0.0 for layer in layers),
        "bias_min": min((layer["bias_min"] for layer in layers if layer["bias_min"] is not None), default=NAN),
        "bias_max": max((layer["bias_max"] for layer in layers if layer["bias_max"] is not None), default=NAN),
    }


@dataclass
class Binned:
    """A curve of few points: the mean of each bin, and the least and greatest value, so that no spike is lost."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


def subsample(x: np.ndarray, y: np.ndarray, max_points: int = 600) -> Binned:
    """Reduce a curve to at most ``max_points`` bins of equally many points; up to twice as many stay as they are."""
    if len(x) <= 2 * max_points:
        return Binned(x, y, None, None)
    edges = np.linspace(0, len(x), max_points + 1).astype(int)[:-1]
    ok = np.isfinite(y)
    counts = np.add.reduceat(ok, edges)
    mean = np.add.reduceat(np.where(ok, y, 0.0), edges) / np.maximum(counts, 1)
    low = np.minimum.reduceat(np.where(ok, y, np.inf), edges)
    high = np.maximum.reduceat(np.where(ok, y, -np.inf), edges)
    mean, low, high = (np.where(counts > 0, v, NAN) for v in (mean, low, high))
    sizes = np.diff(np.append(edges, len(x)))
    return Binned(np.add.reduceat(x, edges) / sizes, mean, low, high)
