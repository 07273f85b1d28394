"""Entry point of one training process: ``python -m titan_moe.train``, as ``torchrun`` starts it."""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from titan_moe.config import load_config, to_toml
from titan_moe.errors import describe, end_with_parent, exit_code, reported

LAUNCHED = "TITAN_MOE_LAUNCHED"
"""Set in the environment of ranks that ``titan-moe train`` started and whose errors it prints."""


def main(argv: Sequence[str] | None = None) -> None:
    """Trains as the command line says; ends the process with exit code 1 or 2 on an error."""
    arguments = sys.argv[1:] if argv is None else argv
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A launcher killed outright must not leave ranks behind that go on writing into the run's folder.
        end_with_parent()
    with reported("--debug.traceback" in arguments):
        config = load_config(arguments)
        if config.job.print_config and os.environ.get("RANK", "0") == "0":
            print(to_toml(config), flush=True)
    with reported(config.debug.traceback), _recorded(config.debug.traceback):
        from titan_moe.trainer import train

        train(config)


@contextmanager
def _recorded(show_traceback: bool) -> Iterator[None]:
    """Under torchrun, leaves an error where the launcher finds it; ours then reports the first rank to fail."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        yield
    except Exception as error:
        if path is not None:
            now = time.time()
            details = {"py_callstack": traceback.format_exc(), "timestamp": str(int(now)), "time": now}
            details["exit_code"] = exit_code(error)
            with open(path, "w") as file:
                json.dump({"message": {"message": describe(error), "extraInfo": details}}, file)
            if LAUNCHED in os.environ and isinstance(error, ValueError | OSError) and not show_traceback:
                raise SystemExit(exit_code(error)) from None
        raise


if __name__ == "__main__":
    main()
