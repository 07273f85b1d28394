"""Configuration: a tree of dataclasses, read from TOML and the command line. Imports no torch."""

from titan_moe.config.degrees import Degrees, resolve_degrees
from titan_moe.config.job import JobConfig
from titan_moe.config.load import from_dict, load_config, read_options, to_toml
from titan_moe.config.validate import (
    left_out_of_loading,
    model_overrides,
    resolve_batch,
    resolved_dtypes,
    resolved_seed,
    validate,
)

__all__ = [
    "Degrees",
    "JobConfig",
    "from_dict",
    "left_out_of_loading",
    "load_config",
    "model_overrides",
    "read_options",
    "resolve_batch",
    "resolve_degrees",
    "resolved_dtypes",
    "resolved_seed",
    "to_toml",
    "validate",
]
