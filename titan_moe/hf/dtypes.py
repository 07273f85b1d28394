"""Which dtype each tensor of an export has: one for all, one per name pattern, or that of the source."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch

from titan_moe.errors import ConfigError, nearest
from titan_moe.hf.names import is_router

FP8 = torch.float8_e4m3fn
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Dtype = torch.dtype | Literal["fp8", "source"] | None

# The linears that published FP8 checkpoints hold in FP8.
_LINEAR = re.compile(r"\.layers\.\d+\..*\.(\w+_proj|kv_a_proj_with_mqa|w[123])\.weight$")


def export_dtype(name: str | None) -> Dtype:
    """The dtype that a command line or a TOML file calls ``name``, such as ``bfloat16``, ``fp8`` or ``source``.

    Raises:
        ConfigError: for any other name.
    """
    named = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS} | {"fp8": "fp8", "source": "source"}
    if name is not None and name not in named:
        raise ConfigError(f"dtype {name!r}: unknown.{nearest(name, named)}")
    return None if name is None else named[name]


def check_dtype(dtype: Dtype, *, export: bool = False) -> None:
    """Refuses a dtype that weights cannot have; None is fine. Exports may also have "fp8" and "source"."""
    legal = [None, *FLOATS, *(("fp8", "source") if export else ())]
    if not any(dtype is each or (isinstance(dtype, str) and dtype == each) for each in legal):
        raise ConfigError(f"dtype = {dtype!r}: must be one of {', '.join(map(str, legal))}.")


def is_fp8_linear(hf_name: str, shape: tuple[int, ...]) -> bool:
    """Whether published FP8 checkpoints hold such a tensor in FP8: matrices of attention, feed-forward and experts."""
    return len(shape) == 2 and _LINEAR.search(hf_name) is not None and not hf_name.endswith(".eh_proj.weight")


@dataclass(frozen=True)
class DtypePolicy:
    """The dtype of a tensor in the file, ``float8_e4m3fn`` for one with a scale per 128 x 128 block.

    Args:
        dtype: of all float tensors, though router weights and expert biases stay fp32 at least; None: the model's own;
            "fp8": linears in FP8, the rest bfloat16; "source": what ``stored`` says, else the model's own.
        rules: patterns of Hugging Face names (``*`` matches dots too) with a dtype each; the first that fits decides,
            for router weights as well. Integers stay what they are in any case.
        stored: dtypes in the files that the model came from.

    Raises:
        ConfigError: for a dtype that weights cannot have.
    """

    dtype: Dtype = None
    rules: tuple[tuple[str, Dtype], ...] = ()
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_dtype(self.dtype, export=True)
        for _, dtype in self.rules:
            check_dtype(dtype, export=True)

    def of(self, hf_name: str, shape: tuple[int, ...], own: torch.dtype) -> torch.dtype:
        """The dtype of one tensor whose dtype in the model is ``own``."""
        if not own.is_floating_point:
            return own
        for pattern, dtype in self.rules:
            if fnmatchcase(hf_name, pattern):
                if dtype == "fp8" and len(shape) != 2:
                    raise ConfigError(f"{pattern} = fp8: {hf_name} of shape {list(shape)} is no matrix.")
                return self._resolved(dtype, hf_name, own, fp8=True)
        dtype = self._resolved(self.dtype, hf_name, own, fp8=is_fp8_linear(hf_name, shape))
        if is_router(hf_name) and self.dtype != "source":
            return torch.promote_types(dtype, torch.float32)
        return dtype

    def check_used(self, hf_names: Iterable[str]) -> None:
        """Refuses a rule that fits no tensor."""
        names = list(hf_names)
        for pattern, _ in self.rules:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"dtype_for {pattern!r}: fits no tensor, such as {names[0]}. '*' matches anything.")

    def _resolved(self, dtype: Dtype, hf_name: str, own: torch.dtype, *, fp8: bool) -> torch.dtype:
        if dtype == "fp8":
            return FP8 if fp8 else torch.bfloat16
        if dtype == "source":
            return self.stored.get(hf_name, own)
        return own if dtype is None else dtype
