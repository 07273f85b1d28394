"""A dataset tokenized once, in memory-mapped files that every process of a run shares.

On disk, under ``cache_dir/<key>``, for each split: ``<split>.tokens.bin``, all documents one after the
other, each ending in the end-of-sequence token, and ``<split>.offsets.npy``, where each document starts
(int64, one more entry than documents). ``meta.json`` holds the counts and the CRC-32 of every file and of
itself. The key is a hash of everything the content depends on, so a changed file or tokenizer makes a new
cache. Every process checks the checksums when it opens the cache, about 0.3 s per GB; loader workers map
what their parent has checked.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from titan_moe.data.sources import BadRecords, Source
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.errors import DataError

FORMAT_VERSION = 2
SPLITS = ("train", "validation")
_BATCH_CHARACTERS = 4 << 20
_CHUNK_BYTES = 1 << 24

logger = logging.getLogger(__name__)


def in_validation_split(key: str, fraction: float) -> bool:
    """Whether the document is held out: its key's SHA-256, as a number in [0, 1), is below the fraction.

    A document's side depends on its key and the fraction alone; raising the fraction only adds documents.
    """
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < int(fraction * 2**64)


class Corpus:
    """One split of a tokenized dataset, memory-mapped read-only.

    Attributes:
        tokens: uint16 or uint32 ``[num_tokens]``, an end-of-sequence token after every document.
        offsets: int64 ``[num_documents + 1]``, document d is ``tokens[offsets[d]:offsets[d + 1]]``.
        num_bytes: UTF-8 bytes of the split's text.
        bad_records: records skipped in the whole dataset.
        first_bad_record: the first of them and what is wrong with it.

    Raises:
        ValueError, OSError: the files are missing or do not fit each other.
    """

    def __init__(self, folder: Path, split: str):
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        counts = meta["splits"][split]
        self.folder, self.split = folder, split
        self.num_documents: int = counts["documents"]
        self.num_tokens: int = counts["tokens"]
        self.num_bytes: int = counts["bytes"]
        self.bad_records: int = meta["bad_records"]
        self.first_bad_record: str = meta["first_bad_record"]
        self.offsets = np.load(folder / f"{split}.offsets.npy", mmap_mode="r", allow_pickle=False)
        path, dtype = folder / f"{split}.tokens.bin", np.dtype(meta["dtype"])
        if self.offsets.shape != (self.num_documents + 1,) or self.offsets[-1] != self.num_tokens:
            raise ValueError(f"{folder}: offsets do not match meta.json")
        if path.stat().st_size != self.num_tokens * dtype.itemsize:
            raise ValueError(f"{path}: {path.stat().st_size} bytes for {self.num_tokens} tokens")
        # An empty file cannot be mapped.
        self.tokens = np.memmap(path, dtype, mode="r") if self.num_tokens else np.empty(0, dtype)

    def __reduce__(self):
        # A pickled memmap would carry the data; a reader in another process maps the files again.
        return Corpus, (self.folder, self.split)


def open_corpus(
    source: Source, tokenizer: Tokenizer, cache_dir: Path, *, fraction: float = 0.0, skip_bad_records: bool = False
) -> dict[str, Corpus]:
    """Opens the tokenized dataset, tokenizing it first if no complete cache is there.

    Any number of processes may call this at once: one builds under a file lock, the others wait for it.

    Args:
        source: the dataset.
        tokenizer: what makes the tokens.
        cache_dir: folder of all caches; made if missing.
        fraction: share of the documents held out in split 'validation'; 0 makes split 'train' alone.
        skip_bad_records: skip and count bad records instead of stopping at the first.

    Returns:
        The splits by name. A split may be empty.

    Raises:
        DataError: bad data, or a cache folder that cannot be written.
    """
    splits = SPLITS if fraction > 0 else SPLITS[:1]
    identity = [FORMAT_VERSION, source.kind, source.fingerprint(), tokenizer.identity, fraction, skip_bad_records]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    folder = cache_dir / key
    found, _ = _try_open(folder, splits)
    if found is None:
        try:
            with _locked(cache_dir, key):
                found, damage = _try_open(folder, splits)
                if found is None:
                    if damage:
                        logger.warning("Rebuilding the damaged token cache %s (%s).", folder, damage)
                    _build(folder, source, tokenizer, fraction, splits, BadRecords(skip_bad_records))
                    found = {split: Corpus(folder, split) for split in splits}
        except OSError as error:
            raise DataError(
                f"Cannot write the token cache {str(folder)!r}: {error.strerror or error}. "
                f"Make room or permission there, or choose another job.dump_folder."
            ) from error
    return found


def _try_open(folder: Path, splits: tuple[str, ...]) -> tuple[dict[str, Corpus] | None, str]:
    """The splits, or None and what is wrong with the cache ("" if it is not there): then it is built anew."""
    if not folder.is_dir():
        return None, ""
    try:
        _verify(folder)
        return {split: Corpus(folder, split) for split in splits}, ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError) as error:
        return None, str(error)


def _verify(folder: Path) -> None:
    """Raises ValueError when a file of the cache does not have its checksum."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if meta.pop("crc32") != _meta_crc32(meta):
        raise ValueError(f"{folder / 'meta.json'}: the checksum does not fit")
    for name, crc in meta["files"].items():
        if _crc32(folder / name) != crc:
            raise ValueError(f"{folder / name}: the checksum does not fit")


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _meta_crc32(meta: dict) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


@contextlib.contextmanager
def _locked(cache_dir: Path, key: str) -> Iterator[None]:
    cache_dir.mkdir(parents=True, exist_ok=True)
    with open(cache_dir / f"{key}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Waiting for another process to tokenize the dataset.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Closing the file, or the death of the process, frees the lock.
        yield


class _SplitWriter:
    """Appends documents of one split to its token file."""

    def __init__(self, stream: BinaryIO, dtype: np.dtype, eos_id: int):
        self._stream = stream
        self._eos = np.array([eos_id], dtype)
        self.lengths = array("q")
        self.num_bytes = 0

    def write(self, tokens: np.ndarray, num_bytes: int) -> None:
        self._stream.write(tokens.astype(self._eos.dtype, copy=False))
        self._stream.write(self._eos)
        self.lengths.append(len(tokens) + 1)
        self.num_bytes += num_bytes

    def offsets(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)


def _build(
    folder: Path, source: Source, tokenizer: Tokenizer, fraction: float, splits: tuple[str, ...], bad: BadRecords
) -> None:
    """Writes the cache beside its place, then renames it there: a reader sees all of it or nothing."""
    for left_over in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    aside.mkdir()
    try:
        _write(aside, source, tokenizer, fraction, splits, bad)
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(aside, folder)
        _fsync(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(
    aside: Path, source: Source, tokenizer: Tokenizer, fraction: float, splits: tuple[str, ...], bad: BadRecords
) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(open(aside / f"{split}.tokens.bin", "wb")) for split in splits]
        writers = [_SplitWriter(stream, dtype, tokenizer.eos_id) for stream in streams]
        for keys, texts in _batched(_with_progress(source, bad)):
            for key, text, tokens in zip(keys, texts, tokenizer.encode_batch(texts), strict=True):
                writer = writers[fraction > 0 and in_validation_split(key, fraction)]
                writer.write(tokens, len(text.encode("utf-8")))
        for stream in streams:
            stream.flush()
            os.fsync(stream.fileno())
    counts = {}
    for split, writer in zip(splits, writers, strict=True):
        offsets = writer.offsets()
        with open(aside / f"{split}.offsets.npy", "wb") as stream:
            np.save(stream, offsets, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        counts[split] = {"documents": len(writer.lengths), "tokens": int(offsets[-1]), "bytes": writer.num_bytes}
    meta = {
        "version": FORMAT_VERSION,
        "dtype": dtype.name,
        "bad_records": bad.count,
        "first_bad_record": bad.first,
        "splits": counts,
        "files": {path.name: _crc32(path) for path in sorted(aside.iterdir())},
    }
    meta["crc32"] = _meta_crc32(meta)
    with open(aside / "meta.json", "w", encoding="utf-8") as stream:
        json.dump(meta, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    _fsync(aside)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _batched(documents: Iterator[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Documents in groups of a few million characters; empty ones are left out."""
    keys, texts, size = [], [], 0
    for key, text in documents:
        if not text:
            continue
        keys.append(key)
        texts.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield keys, texts
            keys, texts, size = [], [], 0
    if keys:
        yield keys, texts


def _with_progress(source: Source, bad: BadRecords) -> Iterator[tuple[str, str]]:
    """The documents, with a progress bar where standard error is a terminal."""
    # Compressed and columnar files do not tell how much text they hold.
    total = None if source.kind in ("parquet", "huggingface") else source.num_file_bytes()
    columns = (TextColumn("Tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenize", total=total)
        for key, text in source.documents(bad):
            yield key, text
            progress.advance(task, len(text))
