"""Text to token ids and back: raw bytes, or any ``tokenizer.json``."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from titan_moe.data.sources import BadRecords, open_source
from titan_moe.errors import ConfigError, DataError, nearest

END_OF_TEXT = "<|endoftext|>"
# Tried in this order when no tokenizer_config.json names the end-of-sequence token.
EOS_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek writes it with full-width bars)
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<|return|>",
    "<|im_end|>",
)


class ByteTokenizer:
    """One token per UTF-8 byte: ids 0 to 255, and 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    identity = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without an end-of-sequence token."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD, eos is dropped."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> torch.Tensor:
        """UTF-8 bytes each token stands for, int64 ``[vocab_size]``; eos counts 0."""
        return torch.tensor([1] * 256 + [0])

    def save(self, folder: Path) -> None:
        """Writes nothing: this tokenizer has no file."""


class FileTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` library.

    Special tokens written out in a text become that token's id, as with Hugging Face tokenizers; none is
    added at either end.

    Args:
        path: the tokenizer.json, or the folder that holds it. A tokenizer_config.json beside it may name
            the end-of-sequence token; otherwise it is found by its common names.

    Raises:
        DataError: missing, unreadable, or no end-of-sequence token.
    """

    def __init__(self, path: str | os.PathLike):
        # Set explicitly, the library neither warns nor changes its behaviour when loader processes are
        # forked later; those never tokenize.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        from tokenizers import Tokenizer as Backend

        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise DataError(f"model.tokenizer: no file {str(file)!r}; give 'bytes' or the path of a tokenizer.json.")
        try:
            content = file.read_text(encoding="utf-8")
            self._backend = Backend.from_str(content)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{file} is not a readable tokenizer.json: {' '.join(str(error).split())}") from error
        self._files = [path for path in (file, file.with_name("tokenizer_config.json")) if path.is_file()]
        self._backend.no_truncation()
        self._backend.no_padding()
        self._state = json.loads(content)
        self.vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocab.values()) + 1
        self.eos_id = self._find_eos(file)
        self.identity = f"{hashlib.sha256(content.encode()).hexdigest()}:{self.eos_id}"

    def _find_eos(self, file: Path) -> int:
        config = file.with_name("tokenizer_config.json")
        named = None
        if config.is_file():
            try:
                named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError, OSError) as error:
                raise DataError(f"{config} is not a readable JSON object: {error}") from error
        if isinstance(named, dict):
            named = named.get("content")
        if named is not None:
            if named not in self.vocab:
                raise DataError(f"{config}: eos_token {named!r} is not in the vocabulary of {file}.")
            return self.vocab[named]
        for name in EOS_NAMES:
            if name in self.vocab:
                return self.vocab[name]
        raise DataError(
            f"{file} has no end-of-sequence token ({', '.join(EOS_NAMES)}): "
            f'name it in a tokenizer_config.json beside it, {{"eos_token": "..."}}.'
        )

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without an end-of-sequence token."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are dropped."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self) -> torch.Tensor:
        """UTF-8 bytes each token stands for, int64 ``[vocab_size]``; special tokens count 0.

        The sum over a text's tokens is the text's length after the tokenizer's normalizer; it is exact for
        byte-level BPE without one, and for byte-fallback (SentencePiece style) vocabularies up to the
        space that these put in front.
        """
        lengths = np.zeros(self.vocab_size, np.int64)
        added = {token["id"]: token for token in self._state.get("added_tokens", [])}
        byte_level = '"ByteLevel"' in json.dumps([self._state.get("pre_tokenizer"), self._state.get("decoder")])
        for token, index in self.vocab.items():
            if index in added:
                lengths[index] = 0 if added[index]["special"] else len(added[index]["content"].encode("utf-8"))
            elif byte_level:  # each character of the vocabulary's alphabet stands for one byte
                lengths[index] = len(token)
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                lengths[index] = 1
            else:
                lengths[index] = len(token.replace("▁", " ").encode("utf-8"))
        lengths[self.eos_id] = 0
        return torch.from_numpy(lengths)

    def save(self, folder: Path) -> None:
        """Copies the tokenizer's files, as a Hugging Face folder holds them."""
        for file in self._files:
            shutil.copyfile(file, folder / file.name)


Tokenizer = ByteTokenizer | FileTokenizer


def build_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that ``model.tokenizer`` names: 'bytes', or the path of a tokenizer.json or its folder.

    Raises:
        DataError: no such file, not a tokenizer, or no end-of-sequence token.
    """
    if spec == "bytes":
        return ByteTokenizer()
    looks_like_path = os.sep in spec or spec.endswith(".json") or Path(spec).exists()
    if not looks_like_path:
        raise DataError(
            f"model.tokenizer = {spec!r} is neither 'bytes' nor the path of a tokenizer.json.{nearest(spec, ['bytes'])}"
        )
    return FileTokenizer(spec)


def train_tokenizer(
    *,
    dataset: str = "stdlib",
    dataset_path: str | None = None,
    vocab_size: int = 4096,
    output: str,
    skip_bad_records: bool = False,
) -> Path:
    """Trains a byte-level BPE tokenizer on a dataset and writes it, with its config, to a folder.

    Args:
        dataset: kind of dataset, as ``training.dataset``.
        dataset_path: file or folder, as ``training.dataset_path``.
        vocab_size: tokens, at least 257: one per byte and the end-of-text token, whose id is 0.
        output: folder for tokenizer.json and tokenizer_config.json.
        skip_bad_records: skip broken records instead of stopping at the first.

    Returns:
        The path of the tokenizer.json.

    Raises:
        ConfigError: vocabulary too small, or an unknown kind of dataset.
        DataError: the dataset cannot be read or is empty, or the folder cannot be written.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise ConfigError(f"vocab_size = {vocab_size} is too small: 256 bytes and the end-of-text token need 257.")
    source = open_source(dataset, dataset_path)
    folder, bad = Path(output), BadRecords(skip_bad_records)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"Cannot write to {str(folder)!r}: {error.strerror}.") from error
    num_documents = 0

    def texts() -> Iterator[str]:
        nonlocal num_documents
        for _, text in source.documents(bad):
            if text:
                num_documents += 1
                yield text

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(texts(), trainer)
    if not num_documents:
        raise DataError(f"The dataset {str(source.root)!r} holds no text to train a tokenizer on.")
    path, config = folder / "tokenizer.json", {"eos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    try:
        path.write_text(backend.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write to {str(folder)!r}: {error.strerror}.") from error
    skipped = f", {bad.count} bad records skipped" if bad.count else ""
    print(f"Wrote {path}: {backend.get_vocab_size()} tokens from {num_documents} documents{skipped}.")
    return path
