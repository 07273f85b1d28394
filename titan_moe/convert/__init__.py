"""Checkpoints from Hugging Face's format to titan_moe's and back, tensor by tensor, in one process."""

from titan_moe.convert.command import Convert, convert, main

__all__ = ["Convert", "convert", "main"]
