"""Checkpoints that are complete or absent, hold no code, and load under another number of processes."""

from titan_moe.checkpoint.checkpointer import Checkpointer, Loaded
from titan_moe.checkpoint.rng import restore_rng, rng_tensors

__all__ = ["Checkpointer", "Loaded", "restore_rng", "rng_tensors"]
