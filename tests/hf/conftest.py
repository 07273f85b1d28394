"""Checkpoints that several tests start from."""

from pathlib import Path

import pytest
from hf_tiny import hf_model


@pytest.fixture
def qwen(tmp_path) -> Path:
    """A folder with a tiny Qwen3-MoE."""
    folder = tmp_path / "qwen"
    hf_model("Qwen3Moe").save_pretrained(folder)
    return folder
