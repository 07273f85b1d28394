"""Peak memory and time of ``titan-moe convert`` both ways, on a synthetic Qwen3-MoE checkpoint of a given size.

    python benchmarks/convert_memory.py --gigabytes 8 --folder convert_scratch

Layers have the sizes of Qwen3-30B-A3B. Each conversion runs in a process of its own; its peak resident memory is that
process's ``ru_maxrss``, pages of mapped files included. What comes back is compared with what went in.

The folder is removed at the end.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from titan_moe import models
from titan_moe.hf.config import config_to_hf
from titan_moe.hf.folder import Entry, FolderWriter
from titan_moe.hf.gather import Held, all_shapes, hf_tensors
from titan_moe.hf.source import Folder

_MEASURED = """
import resource, sys
from titan_moe.cli import main
main(["convert", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def write_synthetic(folder: Path, gigabytes: float, **override: int) -> int:
    """A bfloat16 checkpoint of at least that size, in files of 2 GB; returns its bytes."""
    config = models.config("qwen3_moe", "30b_a3b", **override)

    def bytes_of(layers: int) -> int:
        shapes = all_shapes(replace(config, num_layers=layers))
        return sum(torch.Size(shape).numel() * 2 for shape in shapes.values())

    layers = max(1, math.ceil((gigabytes * 1e9 - bytes_of(1)) / (bytes_of(2) - bytes_of(1))) + 1)
    config = replace(config, num_layers=layers)
    held = {name: Held(shape, torch.bfloat16, {}) for name, shape in all_shapes(config).items()}
    entries = [Entry(each.name, each.shape, each.dtype) for each in hf_tensors(config, held)]
    hf_config = config_to_hf(config, {}, 0, torch.bfloat16)
    noise = torch.randn(1 << 22).bfloat16()
    with FolderWriter(folder, entries, hf_config, int(2e9)) as writer:
        for i, entry in enumerate(entries):
            values = torch.empty(entry.shape, dtype=torch.bfloat16)
            # Blocks of one noise, of which each tensor starts at its own place.
            for start, block in enumerate(values.view(-1).split(1 << 20)):
                at = (i * 7919 + start * 104729) % ((1 << 22) - block.numel())
                block.copy_(noise[at : at + block.numel()])
            writer.write(entry.name, values)
        writer.finish()
    return sum(entry.nbytes for entry in entries)


def measure(*arguments: str) -> tuple[float, float]:
    """Seconds and peak resident bytes of one ``titan-moe convert``."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _MEASURED, *arguments], check=True, capture_output=True, text=True)
    return time.perf_counter() - start, float(done.stdout.split()[-1])


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder, by name."""
    source = Folder(folder)
    for name in sorted(source.names()):
        yield name, source.part(name)


def run(folder: Path, gigabytes: float, **override: int) -> dict[str, float]:
    """Converts there and back, compares, and removes the folder.

    Returns:
        bytes, and seconds and peak bytes of each direction.
    """
    try:
        size = write_synthetic(folder / "in", gigabytes, **override)
        there = measure(str(folder / "in"), str(folder / "ours"))
        back = measure(str(folder / "ours"), str(folder / "out"), "--dtype", "source", "--max_shard_gb", "2")
        pairs = zip(tensors(folder / "in"), tensors(folder / "out"), strict=True)
        assert all(a[0] == b[0] and a[1].dtype == b[1].dtype and torch.equal(a[1], b[1]) for a, b in pairs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"bytes": size, "there_s": there[0], "there_peak": there[1], "back_s": back[0], "back_peak": back[1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the checkpoint, in 10^9 bytes")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, on a disk with four times that free")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} exists: name a new folder, it is removed at the end")
    print(json.dumps(run(options.folder, options.gigabytes), indent=1))
