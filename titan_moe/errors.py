"""What a user can cause, as exceptions that end in one readable line.

Every class is a ``ValueError``: library users catch it as one, the command line prints it without a
traceback and exits with code 2 (configuration) or 1 (anything found later).
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

_LONGEST_WORD = 200
_LONGEST_LINE = 2000


class ConfigError(ValueError):
    """A configuration that cannot run. Raised before any process group exists."""


class MatchedNothing(ConfigError):
    """A plugin found nothing to change in a module; an error unless it finds something in another pipeline stage."""


class DataError(ValueError):
    """A dataset or tokenizer that cannot be used: missing, empty, broken or too short."""


class CheckpointError(ValueError):
    """A checkpoint or weight file that is missing, torn, damaged or does not fit the model."""


class TrainingError(ValueError):
    """Training that cannot go on, such as a loss that is not finite."""


def nearest(value: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: ``" Did you mean 'x'?"`` or the list of known names.

    Args:
        value: what the user wrote.
        known: the legal names.
    """
    names = sorted(map(str, known))
    close = get_close_matches(str(value), names, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""


@contextmanager
def reported(show_traceback: bool = False) -> Iterator[None]:
    """Ends the process on an error, with one line on stderr: exit code 2 for a ConfigError, else 1.

    Other exceptions than ``ValueError`` and ``OSError`` are faults of the program and keep their traceback.
    Ctrl-C ends with 130 and a closed pipe with 141, as in a shell.

    Args:
        show_traceback: print the traceback above the line.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # Python flushes stdout once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (ValueError, OSError) as error:
        if show_traceback:
            traceback.print_exc()
        print_error(describe(error))
        raise SystemExit(exit_code(error)) from None


def end_with_parent(parent: int | None = None) -> None:
    """Have this process killed when its parent dies, however that happens.

    Args:
        parent: the parent's process id, where it may be dead already; by default who it is now.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def exit_code(error: Exception) -> int:
    """2 for a configuration that cannot run, 1 for anything found later."""
    return 2 if isinstance(error, ConfigError) else 1


def shorten(text: str) -> str:
    """``text`` without the middle of words over 200 characters, such as quoted values, and of itself over 2,000."""
    text = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda word: _cut(word[0], 100, 60), text)
    return _cut(text, 1500, 400) if len(text) > _LONGEST_LINE else text


def _cut(text: str, head: int, tail: int) -> str:
    return f"{text[:head]}… ({len(text)} characters) …{text[-tail:]}"


def print_error(message: str, rank: int | None = None) -> None:
    """The one line an error ends in, on stderr."""
    sys.stdout.flush()
    where = "" if rank is None else f"rank {rank}: "
    print(f"titan-moe: error: {where}{message}", file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """An exception as one line; one that is not ours also says its type and how to see where it came from."""
    text = shorten(" ".join(str(error).split()))
    if isinstance(error, ConfigError | DataError | CheckpointError | TrainingError):
        return text
    return f"{type(error).__name__}: {text} (--debug.traceback shows where)"
