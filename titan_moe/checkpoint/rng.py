"""Random number generators as tensors, for ``Checkpointer.save(rank_tensors=...)``."""

import torch


def rng_tensors() -> dict[str, torch.Tensor]:
    """State of torch's generators of this rank (CPU, and its CUDA device), as uint8 tensors by name."""
    states = {"rng_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng_cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: dict[str, torch.Tensor]) -> None:
    """Put back what ``rng_tensors`` gave; a device that is not in ``states`` is left alone."""
    if "rng_cpu" in states:
        torch.set_rng_state(states["rng_cpu"])
    if "rng_cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["rng_cuda"])
