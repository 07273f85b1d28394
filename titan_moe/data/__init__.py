"""Text in, batches out: sources, tokenizers, the token cache, packing and the loader."""

from titan_moe.data.loader import Loader, build_loader
from titan_moe.data.tokenizer import Tokenizer, build_tokenizer, train_tokenizer

__all__ = ["Loader", "Tokenizer", "build_loader", "build_tokenizer", "train_tokenizer"]
