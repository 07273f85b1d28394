"""Hugging Face checkpoints in and out. Works without transformers, save when a model instance is given."""

from titan_moe.hf.dtypes import export_dtype
from titan_moe.hf.load import attach_origin, load_hf, load_hf_weights
from titan_moe.hf.save import iter_hf_tensors, save_hf

__all__ = ["attach_origin", "export_dtype", "iter_hf_tensors", "load_hf", "load_hf_weights", "save_hf"]
