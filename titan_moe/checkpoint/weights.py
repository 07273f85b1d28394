"""Reading a finished run from outside it: find its newest checkpoint, read its config, load its weights alone."""

import re
from pathlib import Path
from typing import Any

from torch import nn

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.files import STATE, read_json
from titan_moe.errors import CheckpointError


def find_checkpoint(path: str | Path) -> Path:
    """The ``step-N`` folder that ``path`` is, or the newest complete one in it or in its folder ``checkpoint``.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder. Name a run's dump folder, or a step-N folder in it.")
    if re.fullmatch(r"step-\d+", path.name):
        return path
    for folder in (path, path / "checkpoint"):
        if folder.is_dir() and (step := Checkpointer(folder, read_only=True).latest()) is not None:
            return folder / f"step-{step}"
    raise CheckpointError(f"{path}: no complete checkpoint (a folder step-N with a manifest) in it.")


def saved_config(folder: Path) -> dict[str, Any]:
    """The run's configuration as a ``step-N`` folder keeps it.

    Raises:
        CheckpointError: the folder has no readable one.
    """
    state = read_json(folder / STATE)
    try:
        return dict(state["extra"]["config"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE} holds no configuration: no training run wrote it.") from error


def load_weights(model: nn.Module, path: str | Path) -> Path:
    """Load parameters and buffers into ``model`` in place, without the optimizer; returns the folder read.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it does not fit the model.
    """
    folder = find_checkpoint(path)
    step = int(folder.name.removeprefix("step-"))
    Checkpointer(folder.parent, read_only=True).load(model, step=step)
    return folder
