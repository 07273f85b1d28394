"""Options and fixtures of the whole suite."""

from collections.abc import Callable, Iterator

import pytest
from pool import WorkerPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, and only those")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = config.getoption("--slow")
    chosen = [item for item in items if (item.get_closest_marker("slow") is not None) == slow]
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
