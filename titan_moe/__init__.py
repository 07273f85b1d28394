"""titan_moe: training of Mixture-of-Experts models on plain ``nn.Module``s with PyTorch's own distributed stack."""

from importlib import import_module

__version__ = "0.1.0"

# Loaded on first use, so that the command line's --help does not wait for torch.
_LAZY = {
    "load_hf": "titan_moe.hf",
    "save_hf": "titan_moe.hf",
    "iter_hf_tensors": "titan_moe.hf",
    "build_meshes": "titan_moe.parallelize",
    "Parallelism": "titan_moe.config.job",
}
_ROOMS = ("models", "moe", "parallelize")


def __getattr__(name: str):
    if name in _ROOMS:
        return import_module(f"titan_moe.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'titan_moe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_ROOMS])
