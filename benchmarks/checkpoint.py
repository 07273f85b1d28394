"""Speed of checkpoints, against torch.save and torch.load of the same bytes in the same run.

Each rank holds an equal share of stacked experts and AdamW's two moments of them. Every figure is the median over
rounds of all ranks' bytes over the time of the slowest rank; ranks start each timing together.

    python benchmarks/checkpoint.py [--ranks 2] [--mb 512] [--rounds 5] [--folder /tmp]

Reading is from the page cache on both sides, writing ends with a flush to the disk on both.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_moe.checkpoint import Checkpointer

MB = 1_000_000
EXPERTS, DIM, LAYERS = 32, 256, 6


class Experts(nn.Module):
    """``LAYERS`` stacked expert matrices of together ``values`` values, cut over ``dim``."""

    def __init__(self, values: int, dim: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        hidden = max(dist.get_world_size(), values // (LAYERS * EXPERTS * DIM))
        for layer in range(LAYERS):
            whole = torch.randn(EXPERTS, hidden, DIM)
            self.register_parameter(f"w{layer}", nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)])))


def state(values: int, dim: int) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """A model with moments as after a step, and this rank's bytes of them."""
    model = Experts(values, dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": parameter.detach().clone(),
            "exp_avg_sq": parameter.detach().clone().square_(),
        }
    return model, optimizer, 3 * sum(parameter.to_local().nbytes for parameter in model.parameters())


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach().to_local()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value.to_local() if hasattr(value, "to_local") else value
    return tensors


def timed(work: Callable[..., object], *args: object) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work(*args)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def bytes_read() -> int:
    """Bytes that this process has asked the system for so far, from the page cache or not."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("/proc/self/io has no rchar")


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path) -> None:
    torch.load(path, weights_only=True)


def run(rank: int, args: argparse.Namespace, folder: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    values = args.mb * MB // 12
    model, optimizer, own = state(values, 0)
    other_model, other_optimizer, _ = state(values, 1)
    total = torch.tensor(own)
    dist.all_reduce(total)
    root = Path(folder)
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    modes = {mode: Checkpointer(root / mode, 1, async_mode=mode) for mode in ("disabled", "async", "process")}
    read = 0
    for number in range(args.rounds + 1):
        path = root / f"plain-{rank}.pt"
        note("torch.save", timed(torch_save, plain(model, optimizer), path))
        note("torch.load", timed(torch_load, path))
        step = number + 1
        note("save", timed(modes["disabled"].save, step, model, optimizer))
        for mode in ("async", "process"):
            checkpointer = modes[mode]
            stall = timed(checkpointer.save, step, model, optimizer)
            note(f"stall of {mode}", stall)
            note(f"save, {mode}", stall + timed(checkpointer.wait))
        before = bytes_read()
        note("load, same layout", timed(modes["disabled"].load, model, optimizer))
        read = bytes_read() - before
        note("load, other layout", timed(modes["disabled"].load, other_model, other_optimizer))
    counted = torch.tensor(read)
    dist.all_reduce(counted)
    if rank == 0:
        files = sum(path.stat().st_size for path in (root / "disabled").glob("step-*/*"))
        report(args, total.item(), seconds, counted.item(), files)
    for checkpointer in modes.values():
        checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, total: int, seconds: dict[str, list[float]], read: int, files: int) -> None:
    # The first round allocates, and starts the process that writes.
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    print(f"{total / MB:,.0f} MB on {args.ranks} ranks, median of {args.rounds} rounds after a first one")
    for name, value in medians.items():
        low, high = min(seconds[name][1:]), max(seconds[name][1:])
        print(f"{name:20s} {total / MB / value:9,.0f} MB/s   {value:7.3f} s ({low:.3f} to {high:.3f})")
    for mode in ("async", "process"):
        stalls = zip(seconds[f"stall of {mode}"][1:], seconds["save"][1:], strict=True)
        share = statistics.median(stall / save for stall, save in stalls)
        first = seconds[f"stall of {mode}"][0] / seconds["save"][0]
        print(f"stall of {mode:11s} {share:6.1%} of the synchronous save (first: {first:.1%})")
    print(f"load, same layout: {read:,} bytes read by all ranks, {files:,} in the files: {read / files:.3f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=int, default=512, help="parameters and moments of all ranks together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder by default")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        mp.spawn(run, (args, folder, str(Path(folder) / "store")), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
