"""Writing checkpoints beside the training, in a thread or in a process of its own.

Ranks agree over groups that training does not use, so the two never wait in each other's collectives.
"""

import atexit
import multiprocessing
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from titan_moe.checkpoint.parts import Part
from titan_moe.checkpoint.snapshot import Place, Snapshot, views
from titan_moe.checkpoint.write import Save, write_checkpoint
from titan_moe.distributed import broadcast_object, patient_group, rank, world_size
from titan_moe.errors import CheckpointError, end_with_parent


class Background:
    """At most one write at a time. All ranks make it, and call ``start`` and ``wait``, alike.

    Args:
        timeout_seconds: how long a rank waits for the slowest one.
        in_process: write in a process of its own, which the training's interpreter does not slow down.
    """

    def __init__(self, timeout_seconds: float, *, in_process: bool) -> None:
        self._snapshot = Snapshot(shared=in_process)
        self._writer = _ProcessWriter(timeout_seconds) if in_process else _ThreadWriter(timeout_seconds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[None] | None = None

    def start(self, save: Save, parts: dict[str, Part]) -> None:
        """Copy ``parts`` and begin to write them; ``wait`` first. What goes wrong, ``wait`` tells."""
        assert self._future is None, "the write before has not been waited for"
        try:
            places = self._snapshot.take(parts)
        except CheckpointError as error:
            save, places = replace(save, fault=str(error)), {}
        self._future = self._thread.submit(self._writer.write, save, self._snapshot.block, places)

    @property
    def writing(self) -> bool:
        """Whether a write is still going on."""
        return self._future is not None and not self._future.done()

    @property
    def failed(self) -> bool:
        """Whether a write has ended in an error that ``wait`` has not raised yet."""
        return self._future is not None and self._future.done() and self._future.exception() is not None

    def wait(self) -> None:
        """Until the last write has ended.

        Raises:
            CheckpointError: it failed; said once.
        """
        future, self._future = self._future, None
        if future is not None:
            future.result()

    def close(self) -> None:
        """Wait for the last write and free what it took. Raises as ``wait`` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._writer.close()


class _ThreadWriter:
    def __init__(self, timeout_seconds: float) -> None:
        self._group = patient_group(timeout_seconds)

    def write(self, save: Save, block: torch.Tensor, places: dict[str, Place]) -> None:
        write_checkpoint(save, views(block, places), self._group)

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class _ProcessWriter:
    """The training's side of the process; they share the snapshot's memory."""

    def __init__(self, timeout_seconds: float) -> None:
        self._store, address = None, None
        if world_size() > 1:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            if rank() == 0:
                self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            address = host, broadcast_object(self._store.port if rank() == 0 else None)
        # Spawned: a fork would copy threads' locks in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, address, rank(), world_size(), timeout_seconds, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()
        self._block: torch.Tensor | None = None
        # Before multiprocessing's own, which would wait for a process that knows no signals.
        atexit.register(self.close)

    def write(self, save: Save, block: torch.Tensor, places: dict[str, Place]) -> None:
        try:
            # The block goes along when it is a new one.
            self._connection.send((save, None if block is self._block else block, places))
            self._block = block
            failure = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(1)
            code = self._process.exitcode
            raise CheckpointError(
                f"saving step {save.step} in {save.folder} failed: rank {rank()}'s process that writes checkpoints "
                f"ended with exit code {code}; restart the run to go on saving"
            ) from error
        if failure is not None:
            raise CheckpointError(failure)

    def close(self) -> None:
        atexit.unregister(self.close)
        # It ends when nobody holds the other end.
        self._connection.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


def _serve(
    connection: Connection,
    address: tuple[str, int] | None,
    rank: int,
    ranks: int,
    timeout_seconds: float,
    parent: int,
) -> None:
    """The life of the process: one write after another, until the training's side is closed."""
    end_with_parent(parent)
    # Whoever stops a run stops the training, which lets go of this process once it has saved.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    if address is not None:
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_seconds)
        )
    block: torch.Tensor | None = None
    while True:
        try:
            save, new_block, places = connection.recv()
        except EOFError:
            break
        block = block if new_block is None else new_block
        connection.send(_failure_of(save, views(block, places)))


def _failure_of(save: Save, parts: dict[str, Part]) -> str | None:
    try:
        write_checkpoint(save, parts)
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # reported by the training's side, which alone has a log
        return f"saving step {save.step} in {save.folder} failed: {type(error).__name__}: {error}"
    return None
