"""``titan-moe inspect``: what a checkpoint holds, whether it is intact, and how it differs from another."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titan_moe.checkpoint import files
from titan_moe.checkpoint.index import METADATA, parse_index
from titan_moe.checkpoint.parts import Part
from titan_moe.checkpoint.tensors import read_tensors
from titan_moe.checkpoint.weights import find_checkpoint
from titan_moe.config import from_dict, read_options, resolve_degrees
from titan_moe.errors import CheckpointError, ConfigError

_USAGE = "titan-moe inspect DIR [--diff OTHER] [--no_verify]"
_MIB = 1 << 20


@dataclass
class Inspect:
    """Show a checkpoint: its model, layout, step and tensors; exit code 1 when it is damaged or differs."""

    diff: str | None = None
    """Another checkpoint; what differs is listed."""
    verify: bool = True
    """Read every file and compare its checksum."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's description, without its tensors' values."""

    folder: Path
    manifest: files.Manifest
    about: dict[str, Any]
    index: Metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return self.index.state_dict_metadata


def main(argv: Sequence[str]) -> None:
    """Ends the process with exit code 1 when the checkpoint is damaged, or differs from ``--diff``."""
    if argv[:1] and argv[0] not in ("-h", "--help") and not argv[0].startswith("-"):
        path, argv = argv[0], argv[1:]
    else:
        path = None
    options = Inspect(**read_options(Inspect, argv, _USAGE))
    if path is None:
        raise ConfigError(f"{_USAGE}: name a run's dump folder, its checkpoint folder or a step-N folder.")
    console = Console(highlight=False, soft_wrap=True)
    paths = [path] if options.diff is None else [path, options.diff]
    checkpoints = []
    for folder in map(find_checkpoint, paths):
        manifest = files.read_manifest(folder)
        if options.verify:
            with _progress("verifying", sum(size for size, _ in manifest.files.values())) as advance:
                damaged = damaged_files(folder, manifest, advance)
            for file in damaged:
                console.print(f"{file} damaged: the checksum does not fit", markup=False)
            if damaged:
                raise SystemExit(1)
        checkpoints.append(open_checkpoint(folder, manifest))
    if options.diff is None:
        console.print("\n".join(description(checkpoints[0])), markup=False)
        if options.verify:
            console.print(f"all {len(checkpoints[0].manifest.files)} checksums fit")
        return
    one, other = checkpoints
    with _progress("comparing", len(one.tensors.keys() | other.tensors.keys())) as advance:
        lines = differences(one, other, advance)
    for line in [*lines, *(f"(configuration, not counted) {line}" for line in config_differences(one, other))]:
        console.print(line, markup=False)
    console.print(f"{len(lines)} differences" if lines else "no difference")
    if lines:
        raise SystemExit(1)


def damaged_files(folder: Path, manifest: files.Manifest, advance: Callable[[int], None] = lambda _: None) -> list[str]:
    """Paths of files whose content does not have its checksum; ``advance`` is told of bytes as they are read."""
    return [
        str(folder / name)
        for name, entry in sorted(manifest.files.items())
        if files.checksum(folder / name, advance) != entry
    ]


def open_checkpoint(folder: Path, manifest: files.Manifest) -> Checkpoint:
    """Read what describes the checkpoint.

    Raises:
        CheckpointError: it is damaged, or not what it says.
    """
    try:
        content = files.read_checked(folder, manifest, METADATA)
        about = files.parse_json(files.read_checked(folder, manifest, files.STATE), folder / files.STATE)
    except files.Damaged as damaged:
        raise CheckpointError(f"{damaged} damaged: the checksum does not fit") from damaged
    if not isinstance(about, dict):
        raise CheckpointError(f"{folder / files.STATE} is not a checkpoint's state")
    sizes = {name: size for name, (size, _) in manifest.files.items()}
    return Checkpoint(folder, manifest, about, parse_index(content, str(folder / METADATA), sizes))


def description(checkpoint: Checkpoint) -> list[str]:
    """Lines that say what it is, then a line for each tensor of the model and for each rank's own."""
    manifest, about, tensors = checkpoint.manifest, checkpoint.about, checkpoint.tensors
    extra = about.get("extra") or {}
    size = sum(size for size, _ in manifest.files.values())
    model = {name.removeprefix("model."): entry for name, entry in tensors.items() if name.startswith("model.")}
    values = sum(math.prod(entry.size) for entry in model.values())
    tokens = f", {extra['tokens']:,} tokens" if "tokens" in extra else ""
    lines = [
        str(checkpoint.folder),
        f"model      {_model_name(extra.get('config'))}: {len(model)} tensors, {values:,} values",
        f"step       {manifest.step}{tokens}",
        f"saved by   {about.get('world_size')} processes{_layout(extra.get('config'), about.get('world_size'))}",
        f"optimizer  {'its state by parameter' if about.get('has_optimizer') else 'none'}",
        f"size       {size / _MIB:,.1f} MiB in {len(manifest.files) + 1} files",
        "",
    ]
    rows = [("tensor", "shape", "dtype", "chunks", "optimizer state")]
    moments: dict[str, list[str]] = {}
    for name, entry in sorted(tensors.items()):
        if name.startswith("optim."):
            owner, _, moment = name.removeprefix("optim.").rpartition(".")
            moments.setdefault(owner, []).append(f"{moment} {_dtype(entry)}")
    rows += [_row(f"model.{name}", entry, ", ".join(moments.get(name, []))) for name, entry in sorted(model.items())]
    rows += [_row(name, entry) for name, entry in sorted(tensors.items()) if name.startswith("rank.")]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines


def differences(one: Checkpoint, other: Checkpoint, advance: Callable[[int], None] = lambda _: None) -> list[str]:
    """What differs in the state of training: step, progress, tensors bit by bit. How it is cut does not count.

    Ranks' own tensors are compared when both were saved by the same number of processes. ``advance`` is told of
    each tensor that is done. At most one whole tensor of each is in memory.
    """
    lines = []
    if one.manifest.step != other.manifest.step:
        lines.append(f"step: {one.manifest.step} and {other.manifest.step}")
    lines += _compare("extra", _without_config(one), _without_config(other))
    same_world = one.about.get("world_size") == other.about.get("world_size")
    for name in sorted(one.tensors.keys() | other.tensors.keys()):
        if same_world or not name.startswith("rank."):
            lines += _compare_tensor(name, one, other)
        advance(1)
    return lines


def config_differences(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Keys of the runs' configurations that differ."""
    configs = [(checkpoint.about.get("extra") or {}).get("config") or {} for checkpoint in (one, other)]
    return _compare("", *configs)


def _compare(path: str, one: Any, other: Any) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        lines = []
        for key in sorted(one.keys() | other.keys()):
            lines += _compare(f"{path}.{key}" if path else key, one.get(key), other.get(key))
        return lines
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]


def _without_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return {key: value for key, value in (checkpoint.about.get("extra") or {}).items() if key != "config"}


def _compare_tensor(name: str, one: Checkpoint, other: Checkpoint) -> list[str]:
    entries = [checkpoint.tensors.get(name) for checkpoint in (one, other)]
    if None in entries:
        return [f"{name}: only in {(one if entries[0] else other).folder}"]
    kinds = [f"{list(entry.size)} {_dtype(entry)}" for entry in entries]
    if kinds[0] != kinds[1]:
        return [f"{name}: {kinds[0]} and {kinds[1]}"]
    a, b = (_whole(checkpoint, name) for checkpoint in (one, other))
    bits = [tensor.contiguous().view(-1).view(torch.uint8).view(tensor.numel(), -1) for tensor in (a, b)]
    unequal = int((bits[0] != bits[1]).any(-1).sum())
    if not unequal:
        return []
    distance = (a.double() - b.double()).abs().max().item()
    return [f"{name}: {unequal} of {a.numel()} values differ, by at most {distance:.3g}"]


def _whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    entry = checkpoint.tensors[name]
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    part = Part(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    read_tensors(checkpoint.folder, checkpoint.index, {}, {name: part})
    return tensor


def _dtype(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")


def _row(name: str, entry: TensorStorageMetadata, state: str = "") -> tuple[str, ...]:
    return name, str(list(entry.size)), _dtype(entry), str(len(entry.chunks)), state


def _model_name(config: Any) -> str:
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return "unknown (no training run wrote it)"
    changed = "".join(f" {key}={value}" for key, value in (model.get("override") or {}).items())
    return f"{model.get('name')} {model.get('flavor')}{changed}"


def _layout(config: Any, ranks: Any) -> str:
    if not isinstance(config, dict) or not isinstance(ranks, int):
        return ""
    try:
        degrees = resolve_degrees(from_dict({"parallelism": config.get("parallelism", {})}).parallelism, ranks)
    except ConfigError as error:
        return f" (in a layout that this version does not know: {error})"

    def cut(sizes: dict[str, int]) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "whole"

    return f": dense {cut(degrees.dense)}; experts {cut(degrees.expert)}"


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)
