"""``titan-moe doctor``: what this machine has, and what is missing for which feature."""

import importlib
import os
import platform
import sys
from importlib import metadata

from rich.console import Console
from rich.table import Table

from titan_moe import __version__

REQUIRED = ("torch", "torchao", "torchdata", "triton", "safetensors", "tokenizers", "tyro", "rich", "tensorboard")

OPTIONAL = {
    "transformer-engine": ("transformer_engine", None, "FP8 recipes on NVIDIA GPUs"),
    "deep_ep": ("deep_ep", "Buffer", "DeepEP token dispatch between GPUs"),
    "hybridep": ("deep_ep", "HybridEPBuffer", "HybridEP token dispatch (deep_ep's hybrid-ep branch)"),
    "transformers": ("transformers", None, "tests of Hugging Face checkpoints against the original models"),
    "datasets": ("datasets", None, "training.dataset = 'huggingface'"),
    "pyarrow": ("pyarrow", None, "training.dataset = 'parquet'"),
    "wandb": ("wandb", None, "metrics.enable_wandb"),
    "matplotlib": ("matplotlib", None, "plots of the benchmarks"),
}


def doctor() -> None:
    """Prints two tables, versions with devices and optional packages."""
    # A pipe has no width; 80 columns would cut the reasons short.
    console = Console(width=None if sys.stdout.isatty() else 120)
    here = Table("what", "version", title="titan-moe doctor")
    here.add_row("titan_moe", __version__)
    here.add_row("python", f"{platform.python_version()} ({sys.executable})")
    here.add_row("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU threads")
    for package in REQUIRED:
        here.add_row(package, _version(package))
    for name, value in _devices():
        here.add_row(name, value)
    console.print(here)

    extras = Table("optional package", "state", "for", title="optional")
    for package, (module, attribute, purpose) in OPTIONAL.items():
        extras.add_row(package, _state(package, module, attribute), purpose)
    console.print(extras)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _devices() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("devices", f"unknown: torch does not import ({error})")]
    if not torch.cuda.is_available():
        return [("devices", "cpu only"), ("torch threads", str(torch.get_num_threads()))]
    rows = [("cuda", str(torch.version.cuda)), ("nccl", ".".join(map(str, torch.cuda.nccl.version())))]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        rows.append(
            (
                f"gpu {index}",
                f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute {device.major}.{device.minor}",
            )
        )
    return rows


def _state(package: str, module: str, attribute: str | None) -> str:
    """Imports it: a package can be installed and still not load."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "not installed" if error.name == module else f"broken: {error}"
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"
    if attribute is not None and not hasattr(loaded, attribute):
        return f"installed without {attribute}"
    version = _version(package)
    return "ok" if version == "missing" else f"ok, {version}"
