"""Worker processes that live as long as the test session and run a function on n ranks.

They are forked from a server that has torch loaded, so eight of them start in a few seconds, and a test on
them costs a process group and no start-up.
"""

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

MAX_RANKS = 8
GRACE_SECONDS = 2.0

context = multiprocessing.get_context("forkserver")
# Dynamo is what the first optimizer of a process imports: half a second for each worker, if left to them.
context.set_forkserver_preload(
    ["pytest", "torch._dynamo", "torch.distributed.checkpoint", "titan_moe.parallelize.build", "titan_moe.optim"]
)


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


class WorkerPool:
    """Up to eight workers, started when first needed and again after any failure."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None
        self._runs = 0

    def run(self, ranks: int, function: Callable, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on ``ranks`` ranks with an initialised gloo group of exactly that size.

        Args:
            ranks: world size, 1 to 8.
            function: a module-level function of a test module.
            args: picklable arguments, the same on every rank.
            timeout: limit of the whole call, in seconds.

        Returns:
            what each rank returned (picklable, plain tensors), in rank order.

        Raises:
            RankFailure: naming the dead ranks first, then the first error with its traceback.
        """
        assert 1 <= ranks <= MAX_RANKS, ranks
        self._start(ranks)
        self._runs += 1
        task = pickle.dumps((function, args))
        for rank, (_, connection) in enumerate(self._workers[:ranks]):
            connection.send((sys.path, self._runs, rank, ranks, timeout, task))
        results, errors, dead = self._collect(ranks, timeout)
        if len(results) == ranks:
            return [pickle.loads(results[rank]) for rank in range(ranks)]
        silent = sorted(set(range(ranks)) - set(results) - set(errors) - set(dead))
        if not errors and not dead:
            for rank in silent:
                os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
            time.sleep(0.2)
        self.close()
        raise RankFailure(_describe(errors, dead, silent, timeout))

    def _collect(self, ranks: int, timeout: float) -> tuple[dict[int, bytes], dict[int, str], dict[int, int]]:
        """Answers by rank: results, tracebacks, the earliest first, exit codes of dead ranks."""
        results: dict[int, bytes] = {}
        errors: dict[int, tuple[float, str]] = {}
        dead: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        pending = dict(enumerate(self._workers[:ranks]))
        while pending and (left := deadline - time.monotonic()) > 0:
            # The connection of a dead worker is readable too, and reading it ends in EOFError.
            ready = wait([connection for _, connection in pending.values()], left)
            for rank in [rank for rank, (_, connection) in pending.items() if connection in ready]:
                process, connection = pending.pop(rank)
                try:
                    succeeded, answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    process.join(GRACE_SECONDS)
                    dead[rank] = process.exitcode
                else:
                    (results if succeeded else errors)[rank] = answer
            if errors or dead:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        ordered = sorted(errors, key=lambda rank: errors[rank][0])
        return results, {rank: errors[rank][1] for rank in ordered}, dead

    def _start(self, ranks: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self._store.port))
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def close(self) -> None:
        """Kill all workers; the next run starts new ones."""
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []


def _describe(errors: dict[int, str], dead: dict[int, int], silent: list[int], timeout: float) -> str:
    lines = [f"rank {rank} died with exit code {code}" for rank, code in sorted(dead.items())]
    for position, (rank, text) in enumerate(errors.items()):
        first = position == 0 and not dead
        lines.append(f"rank {rank} raised:\n{text}" if first else f"rank {rank} raised {text.strip().splitlines()[-1]}")
    if silent:
        limit = f" within {timeout:g} s" if not errors and not dead else ""
        lines.append(f"no answer{limit} from ranks {', '.join(map(str, silent))}")
    return "\n".join(lines)


def _work(connection: Connection, port: int) -> None:
    """The life of a worker: one task after another until the pool closes the connection."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    faulthandler.register(signal.SIGUSR1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    # The hundreds of thousands of objects that torch consists of are looked through once, not after every test.
    caches = _caches()
    gc.freeze()
    while True:
        try:
            path, run, rank, ranks, timeout, task = connection.recv()
        except EOFError:
            return
        sys.path[:] = path
        try:
            answer = (True, pickle.dumps(_run(dist.PrefixStore(str(run), store), rank, ranks, timeout, task, caches)))
        except BaseException:
            # The group stays open until the pool kills this process, so that neighbours do not fail first.
            answer = (False, (time.monotonic(), traceback.format_exc()))
        connection.send(answer)


def _run(
    store: dist.Store, rank: int, ranks: int, timeout: float, task: bytes, caches: list[functools._lru_cache_wrapper]
) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    function, args = pickle.loads(task)
    result = function(*args)
    dist.barrier()  # a rank that leaves early would close connections its neighbours still use
    dist.destroy_process_group()
    _forget(caches)
    return result


def _forget(caches: list[functools._lru_cache_wrapper]) -> None:
    """Drop what outlives a process group: DTensor's caches and cycles, which hold meshes.

    A gloo group that is held by a mesh keeps its threads, each of which wakes a hundred times a second.
    """
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for cache in (*caches, *_caches()):
        cache.cache_clear()
    gc.collect()


def _caches() -> list[functools._lru_cache_wrapper]:
    """Those of torch.distributed's functions, among the objects that are not frozen."""
    found = [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]
    return [cache for cache in found if (cache.__module__ or "").startswith("torch.distributed")]
