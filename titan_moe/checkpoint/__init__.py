"""Checkpoints that are complete or absent, hold no code, and load under another number of processes."""

from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.checkpoint.rng import restore_rng, rng_tensors
from titan_moe.checkpoint.target import Loaded
from titan_moe.checkpoint.weights import find_checkpoint, load_weights, saved_config

__all__ = [
    "Checkpointer",
    "Loaded",
    "find_checkpoint",
    "load_weights",
    "restore_rng",
    "rng_tensors",
    "saved_config",
]
