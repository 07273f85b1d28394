"""What a user can cause, as exceptions that end in one readable line.

Every class is a ``ValueError``: library users catch it as one, the command line prints it without a
traceback and exits with code 2 (configuration) or 1 (anything found later).
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """A configuration that cannot run. Raised before any process group exists."""


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
