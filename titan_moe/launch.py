"""``titan-moe train``: NGPU processes through torchrun, or a dry run of one of NGPU ranks."""

import logging
import math
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_moe.config import JobConfig, load_config, validate
from titan_moe.errors import ConfigError, print_error, reported
from titan_moe.models import config as model_config
from titan_moe.parallelize import check_run
from titan_moe.train import LAUNCHED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def main(argv: Sequence[str]) -> None:
    """Reads the configuration once, so that its errors show once, then trains; ends the process on an error."""
    with reported("--debug.traceback" in argv):
        config = load_config(argv, model_config=model_config)
        processes = process_count()
        validate(config, processes)
        model, degrees, _ = check_run(config, processes)
        if degrees.ep * degrees.etp > 1:
            from titan_moe.moe.dispatch import check_package

            check_package(model.moe.dispatcher)
        if mode := os.environ.get("COMM_MODE"):
            _dry_run(mode, config, processes)
            return
    if processes > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    raise SystemExit(_torchrun(argv, processes, config))


def _dry_run(mode: str, config: JobConfig, processes: int) -> None:
    """``COMM_MODE=fake_backend``: one rank, ``RANK``, of a world that is not there."""
    if mode != "fake_backend":
        raise ConfigError(f"COMM_MODE = {mode!r}: expected 'fake_backend', or nothing to train.")
    from titan_moe.dry_run import fake_run

    print(fake_run(config, rank_asked(processes), processes), flush=True)


def rank_asked(processes: int) -> int:
    """``RANK`` from the environment, else 0.

    Raises:
        ConfigError: it is no number.
    """
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal():
        raise ConfigError(f"RANK = {rank!r}: expected a number, from 0 to {processes - 1}.")
    return int(rank)


def process_count() -> int:
    """``NGPU`` from the environment, else the GPUs that nvidia-smi lists, else 1.

    Raises:
        ConfigError: NGPU is not a positive number.
    """
    asked = os.environ.get("NGPU")
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise ConfigError(f"NGPU = {asked!r}: expected the number of processes, at least 1.")
        return int(asked)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(line.startswith("GPU ") for line in listing.splitlines())
    if visible is not None:
        present = min(present, len([entry for entry in visible.split(",") if entry.strip()]))
    return max(1, present)


def _torchrun(argv: Sequence[str], processes: int, config: JobConfig) -> int:
    """Runs the ranks and returns the exit code; the last line names the first rank that failed, and why."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # After a rank has failed, the others may sit in a collective until its timeout.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(config.comm.train_timeout_seconds))
    os.environ[LAUNCHED] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", f"--nproc_per_node={processes}", "--signals_to_handle=SIGHUP,SIGQUIT"]
    args = run.parse_args([*options, "-m", "titan_moe.train", *argv])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    try:
        run.run(args)
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: _failed_at(item[1]))
        message = failure.message
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        if isinstance(message, dict):
            # The rank may have been stopped on its way out, when a peer that lost it had left already.
            code = message["extraInfo"].get("exit_code", code)
            message = message["message"]
        elif failure.exitcode == 130:
            message = "interrupted before training began"
        elif failure.exitcode > 0:
            message = f"exit code {failure.exitcode}; its own message is above"
        print_error(message, rank if processes > 1 else None)
        return code
    except KeyboardInterrupt:
        return 130
    return 0


def _failed_at(failure: "ProcessFailure") -> float:
    """Seconds since the epoch, exact where torchrun rounds: the others fail within the second."""
    message = failure.message
    if isinstance(message, dict):
        return message["extraInfo"].get("time", failure.timestamp)
    # A rank that was killed left no time; its peers only noticed. SIGTERM and SIGABRT come after another's failure.
    return 0.0 if failure.exitcode < 0 and -failure.exitcode not in (signal.SIGTERM, signal.SIGABRT) else math.inf


def _pass_on(number: int, frame) -> None:
    """The first signal goes to the ranks, which save and leave in their own time; the second kills them."""
    ranks = child_processes()
    if not ranks:
        raise KeyboardInterrupt
    signal.signal(number, lambda *_: send_signal(signal.SIGKILL, child_processes()))
    send_signal(number, ranks)


def send_signal(number: int, ranks: list[int]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(rank, number)


def child_processes() -> list[int]:
    if Path("/proc/self/stat").exists():
        parents = _parents_in_proc()
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parents = {int(pid): int(parent) for pid, parent in map(str.split, listing.splitlines())}
    return [pid for pid, parent in parents.items() if parent == os.getpid()]


def _parents_in_proc() -> dict[int, int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent …; the name may hold spaces and parentheses.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
    return parents
