"""Steps that succeed on every rank or raise on every rank, so that no rank waits for one that gave up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from titan_moe.distributed import broadcast_object, gather_objects, rank
from titan_moe.errors import CheckpointError

Result = TypeVar("Result")


def on_all_ranks(action: str, function: Callable[[], Result], group: dist.ProcessGroup | None = None) -> list[Result]:
    """Call ``function`` on every rank; its results in rank order.

    Args:
        action: what is being done to what, the head of the error message.
        function: must not communicate.
        group: of all ranks, to agree over; None: the world's own.

    Raises:
        CheckpointError: on every rank, when it failed on any; a rank with a bug raises its own exception.
    """
    result, failure = _attempt(function)
    outcomes = gather_objects((result, None if failure is None else _describe(failure)), group)
    _raise_together(action, failure, {r: text for r, (_, text) in enumerate(outcomes) if text is not None})
    return [result for result, _ in outcomes]


def on_rank_0(action: str, function: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Call ``function`` on rank 0 only; its result on every rank. Raises as ``on_all_ranks`` does."""
    result, failure = _attempt(function) if rank() == 0 else (None, None)
    result, text = broadcast_object((result, None if failure is None else _describe(failure)), group)
    _raise_together(action, failure, {} if text is None else {0: text})
    return result


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as failure:
        return None, failure


def _describe(failure: Exception) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        return f"{failure.strerror} ({failure.filename})" if failure.filename else failure.strerror
    return str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"


def _raise_together(action: str, failure: Exception | None, texts: dict[int, str]) -> None:
    if not texts:
        return
    if failure is not None and not isinstance(failure, OSError | CheckpointError):
        raise failure
    first = min(texts)
    where = "" if set(texts.values()) == {texts[first]} else f"rank {first}: "
    raise CheckpointError(f"{action}: {where}{texts[first]}") from failure
