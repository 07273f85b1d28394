"""Options and fixtures of the whole suite."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Triton reads this when it is first imported. Nothing but the tests of the kernels uses it on a CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from pool import WorkerPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, and only those")
    parser.addoption("--fuzz", type=int, metavar="N", help="run N random layouts of tests/parity, and only those")
    parser.addoption("--seed", type=int, default=0, help="seed of the random layouts")
    parser.addoption("--draw", type=int, metavar="I", help="run only random layout I of the seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def marked(item: pytest.Item, name: str) -> bool:
        return item.get_closest_marker(name) is not None

    if config.getoption("--fuzz") is not None or config.getoption("--draw") is not None:
        chosen = [item for item in items if marked(item, "fuzz")]
    else:
        chosen = [item for item in items if marked(item, "slow") == config.getoption("--slow")]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """The session's worker processes; nothing starts until a test runs something on them."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(worker_pool: WorkerPool) -> Callable:
    """``run_ranks(n, function, *args, timeout=120.0) -> list``: see ``WorkerPool.run``."""
    return worker_pool.run


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of the kernels, each in turn. A test on Triton must launch some: nothing falls back unseen."""
    # Imported here, so that tests without kernels need not load them.
    from titan_moe.kernels.backend import set_backend
    from titan_moe.kernels.launch import observed

    launched, before = [], set_backend(request.param)
    try:
        with observed(lambda kernel, *_: launched.append(kernel)):
            yield request.param
    finally:
        set_backend(before)
    assert bool(launched) == (request.param == "triton")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models, which more threads than one only slow down, and whose sums then have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 24 text files of different lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(24):
        (folder / f"{i}.txt").write_text(f"document {i}: " + " ".join(str(i * j % 97) for j in range(60 + 7 * i)))
    return folder
