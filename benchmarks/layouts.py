"""Step time of layouts against plain FSDP, and what `parallelize` costs on one process.

For each number of processes all layouts train the same model on the same global batch, in the same processes and in
turn, round by round; a layout's figure is the median over rounds of its time divided by FSDP's in the same round. The
overhead on one process is measured alike against the bare module, in CPU time, which other programs disturb less.
Processes share this machine's cores and talk over gloo, so the figures say what a layout costs in work and messages
on a CPU, and nothing about GPUs.

    python benchmarks/layouts.py [--processes 2 4] [--rounds 9] [--steps 2] [--batch 8] [--seq_len 128]
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from titan_moe import models
from titan_moe.config.job import Optimizer, Parallelism
from titan_moe.optim import build_optimizer, clip_grad_norm
from titan_moe.parallelize import build_meshes, build_model, shard_sequence

SIZES = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
NAMES = {
    "dpr": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}
# By number of processes; FSDP takes what the degrees leave.
LAYOUTS = {
    2: ("fsdp", "dpr2", "ep2", "ep2 allgather", "etp2", "tp2", "tp2 ep2", "cp2", "pp2"),
    4: ("fsdp", "dpr2", "ep4", "ep4 allgather", "tp2", "tp2 ep4", "tp4", "tp2 ep2 etp2", "cp2 ep4", "pp2 ep2"),
}
BARE = "bare module"


def keys_of(layout: str) -> tuple[dict[str, int], dict[str, str]]:
    """Degrees, and fields of the model."""
    degrees, fields = {}, {}
    for word in layout.split():
        name = word.rstrip("0123456789")
        if name in NAMES:
            degrees[NAMES[name]] = int(word[len(name) :])
        elif word == "allgather":
            fields["dispatcher"] = word
    return degrees, fields


def training(layout: str, batch: int, seq_len: int) -> Callable[[], None]:
    """A training step of this rank."""
    degrees, fields = keys_of(layout)
    parallelism = Parallelism(**degrees)
    meshes = None if layout == BARE else build_meshes(parallelism)
    config = models.config("qwen3_moe", "debug", **SIZES, **fields)
    runner = build_model(config, parallelism, meshes, device=torch.device("cpu"))
    modules = torch.nn.ModuleList(runner.modules)
    optimizer = build_optimizer(modules, Optimizer())

    ids = torch.randint(config.vocab_size, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0))
    mine = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if meshes is not None:
        place, d = meshes.degrees.coordinates(dist.get_rank())[0], meshes.degrees
        readers, reader = d.dp_replicate * d.dp_shard, place["dp_replicate"] * d.dp_shard + place["dp_shard"]
        mine = {name: tensor[reader::readers] for name, tensor in mine.items()}
        mine = shard_sequence(mine, place["cp"], d.cp)
    weight = torch.tensor(1 / (batch * seq_len))

    def step() -> None:
        runner.train_step(mine, weight)
        clip_grad_norm(modules.parameters(), 1.0, pp=meshes.degrees.pp if meshes else 1)
        optimizer.step()
        optimizer.zero_grad()
        runner.finish_step()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Of one step, as the slowest rank sees it; of CPU time where it is the only one."""
    clock = time.perf_counter if dist.get_world_size() > 1 else time.process_time
    dist.barrier()
    start = clock()
    for _ in range(steps):
        step()
    taken = torch.tensor((clock() - start) / steps)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def measure(rank: int, ranks: int, store: str, args: argparse.Namespace, answer: Any) -> None:
    """One rank: puts the seconds of all candidates by round into ``answer``."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    candidates = LAYOUTS.get(ranks, (BARE, "parallelize"))
    steps = [training(layout, args.batch, args.seq_len) for layout in candidates]
    for step in steps:
        seconds(step, 1)
    # On one process two candidates differ by little, so there are more rounds.
    rounds = args.rounds * (4 if ranks == 1 else 1)
    # Every other round backwards: what comes first pays for what the last one left.
    found = [[0.0] * len(steps) for _ in range(rounds)]
    for index in range(rounds):
        for place in range(len(steps)) if index % 2 else reversed(range(len(steps))):
            found[index][place] = seconds(steps[place], args.steps)
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, args: argparse.Namespace) -> list[list[float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "titan_moe.parallelize", "titan_moe.optim"])
    answer = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, os.path.join(folder, "store"), args, answer)
        processes = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank of {ranks} ended with exit code {process.exitcode}")
    return answer.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4], choices=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps per round and layout")
    parser.add_argument("--batch", type=int, default=8, help="sequences of the global batch")
    parser.add_argument("--seq_len", type=int, default=128)
    args = parser.parse_args()

    console = Console(width=100)
    console.print(
        f"measured on CPU over gloo, {os.cpu_count()} cores, one thread a process; qwen3_moe debug, fp32, "
        f"{args.batch} x {args.seq_len} tokens a step; medians of {args.rounds} rounds"
    )
    for ranks in args.processes:
        rounds = run(ranks, args)
        table = Table("layout", "ms a step", "times fsdp", "min", "max", title=f"{ranks} processes")
        for index, layout in enumerate(LAYOUTS[ranks]):
            ratios = [times[index] / times[0] for times in rounds]
            milliseconds = 1000 * statistics.median(times[index] for times in rounds)
            figures = (statistics.median(ratios), min(ratios), max(ratios))
            table.add_row(layout, f"{milliseconds:.0f}", *(f"{figure:.2f}" for figure in figures))
        console.print(table)
    ratios = [parallel / bare for bare, parallel in run(1, args)]
    overhead = 100 * (statistics.median(ratios) - 1)
    console.print(f"one process: parallelize costs {overhead:+.1f}% against the bare module (median of {len(ratios)})")


if __name__ == "__main__":
    main()
