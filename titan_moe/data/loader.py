"""Batches for training and validation, in an order that no layout changes.

Global step n trains on samples n·G to (n+1)·G, with G the global batch size. Within the step, row b of
micro-step a on data-parallel rank r is sample n·G + (a·ranks + r)·L + b, with L the local batch size.
"""

import atexit
import functools
import logging
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_moe.config import JobConfig, resolve_batch, resolved_seed
from titan_moe.data.corpus import Corpus, open_corpus
from titan_moe.data.packing import PADDING_SAMPLE, PackedDataset
from titan_moe.data.sources import open_source
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.errors import DataError, end_with_parent

VALIDATION_SEED = 0

logger = logging.getLogger(__name__)
_loaders: weakref.WeakSet["Loader"] = weakref.WeakSet()


class StepBatchSampler:
    """This rank's batches of sample numbers, one per micro-step, without end.

    Args:
        start_sample: first sample of the first step; need not be a multiple of the global batch size.
    """

    def __init__(self, start_sample: int, local_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int):
        self.start_sample, self.local, self.total = start_sample, local_batch_size, global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start_sample
        while True:
            for first in range(step + self.dp_rank * self.local, step + self.total, self.local * self.dp_size):
                yield list(range(first, first + self.local))
            step += self.total


class ValidationBatchSampler:
    """This rank's batches of an evaluation: samples 0 to n, each once over all ranks.

    Every rank has the same number of batches, so that none waits for another; the places that are left
    over hold ``PADDING_SAMPLE``.

    Args:
        steps: batches of local_batch_size x dp_size; -1: as many as the samples need.
    """

    def __init__(self, num_samples: int, local_batch_size: int, dp_rank: int, dp_size: int, steps: int):
        needed = -(-num_samples // (local_batch_size * dp_size))
        self.num_samples, self.local = num_samples, local_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.num_batches = needed if steps == -1 else min(steps, needed)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.num_batches):
            first = (step * self.dp_size + self.dp_rank) * self.local
            yield [g if g < self.num_samples else PADDING_SAMPLE for g in range(first, first + self.local)]


class Loader:
    """Iterates over batches: dicts of input_ids, labels and document_ids, each int64 ``[local batch, seq_len]``.

    In training it never ends, and a new iteration goes on after the last complete optimizer step: the state
    counts samples over all ranks, so that it can be loaded with another number of ranks, batch size or
    worker count. In validation every iteration gives the same batches.

    Attributes:
        dataset: the packed samples.
        accumulation_steps: batches per optimizer step (training).
        samples_seen: samples of the complete steps handed out, over all ranks (training).
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        global_batch_size: int | None = None,
        start_sample: int = 0,
        validation_steps: int | None = None,
        num_workers: int = 0,
    ):
        self.dataset = dataset
        self._local, self._rank, self._ranks = local_batch_size, dp_rank, dp_size
        one_pass = local_batch_size * dp_size
        self._global = one_pass if global_batch_size is None else global_batch_size
        self.accumulation_steps, left = divmod(self._global, one_pass)
        assert self.accumulation_steps and not left, (self._global, one_pass)
        self._validation = (
            None
            if validation_steps is None
            else ValidationBatchSampler(
                dataset.sequences_per_epoch, local_batch_size, dp_rank, dp_size, validation_steps
            )
        )
        self._num_workers = num_workers
        self._micro_step = 0
        self.samples_seen = start_sample
        self._batches: Iterator[dict[str, np.ndarray]] | None = None
        _loaders.add(self)

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return self.dataset.corpus.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of the split, the end-of-sequence token of each document included."""
        return self.dataset.corpus.num_tokens

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the split's text."""
        return self.dataset.corpus.num_bytes

    @property
    def bad_records(self) -> int:
        """Records skipped in the dataset, in both splits."""
        return self.dataset.corpus.bad_records

    @property
    def sequences_per_epoch(self) -> int:
        return self.dataset.sequences_per_epoch

    def __iter__(self) -> "Loader":
        self.close()
        if self._validation is not None:
            sampler = self._validation
        else:
            sampler = StepBatchSampler(self.samples_seen, self._local, self._global, self._rank, self._ranks)
            # Built before the fork, the tables of this epoch are shared by the workers.
            self.dataset.epoch(self.samples_seen // self.sequences_per_epoch)
        workers = {}
        if self._num_workers:
            # Workers touch numpy alone. Forked, they start in milliseconds; a fresh interpreter takes seconds.
            workers["multiprocessing_context"] = "fork" if sys.platform == "linux" else None
            workers["worker_init_fn"] = functools.partial(_settle_worker, os.getpid())
        with warnings.catch_warnings():
            # torchdata 0.11 calls a deprecated function of torch; nothing for a user to act on.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            loader = StatefulDataLoader(
                self.dataset,
                batch_sampler=sampler,
                num_workers=self._num_workers,
                collate_fn=_identity,
                # Its own generator, so that starting an iteration draws nothing from the global one.
                generator=torch.Generator(),
                **workers,
            )
        self._batches = iter(loader)
        return self

    def __len__(self) -> int:
        """Batches of an evaluation. A training loader has no length."""
        if self._validation is None:
            raise TypeError("a training loader never ends")
        return len(self._validation)

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._batches is None:
            if self._validation is not None:
                raise StopIteration
            iter(self)
        try:
            # Workers send numpy arrays through a pipe: no shared memory to run out of, no open files.
            arrays = next(self._batches)
        except BaseException:
            self.close()
            raise
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if torch.cuda.is_available():
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        if self._validation is None:
            self._micro_step += 1
            if self._micro_step == self.accumulation_steps:
                self._micro_step = 0
                self.samples_seen += self._global
        return batch

    def state_dict(self) -> dict[str, int]:
        """What was handed out, not what workers have read ahead; an unfinished step counts as not begun."""
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from a state saved under any layout; the next iteration starts there."""
        self.close()
        self.samples_seen = int(state["samples_seen"])

    def close(self) -> None:
        """Ends the iteration and its worker processes."""
        batches, self._batches = self._batches, None
        self._micro_step = 0
        if batches is not None and self._num_workers:
            # Called, not left to the iterator's finalizer: a traceback may hold it until multiprocessing waits
            # for the workers. It asks them to end, then sends the signal that they ignore.
            batches._shutdown_workers()
            for worker in batches._workers:
                worker.kill()


def _identity(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return batch


def _settle_worker(parent: int, worker: int) -> None:
    """Ctrl-C and a termination of the process group are the training process's to handle; its death is not.

    A worker that is writing a batch into the full pipe of a dead process would wait for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(parent)


@atexit.register
def _close_all() -> None:
    # Runs before the handlers of torch and multiprocessing, which were registered by the imports above and
    # would wait for workers that ignore their signal.
    for loader in list(_loaders):
        loader.close()


def build_loader(
    config: JobConfig,
    tokenizer: Tokenizer,
    *,
    dp_rank: int,
    dp_size: int,
    split: Literal["train", "validation"] = "train",
    start_sample: int = 0,
) -> Loader:
    """The loader of one data-parallel rank; tokenizes the dataset at first use, into job.dump_folder/cache.

    With validation enabled on the training dataset itself, validation.fraction of the documents are held
    out by a hash of their key; a validation dataset of its own is used whole, and training then holds
    nothing out. Ranks may call this at once; no collective is involved.

    Args:
        config: the run's, validated.
        start_sample: samples already seen over all ranks (training).

    Raises:
        ConfigError: a setting that cannot work.
        DataError: a dataset that is missing, broken, empty or too short.
    """
    training, validation = config.training, config.validation
    batch = resolve_batch(config, dp_size)
    corpus = _open_split(config, tokenizer, split, report=dp_rank == 0)
    if split == "train":
        dataset = PackedDataset(corpus, training.seq_len, resolved_seed(config), training.document_mask)
        return Loader(
            dataset,
            local_batch_size=batch.local,
            global_batch_size=batch.total,
            dp_rank=dp_rank,
            dp_size=dp_size,
            start_sample=start_sample,
            num_workers=training.num_workers,
        )
    # One order for every seed, shuffled all the same: a few batches are a fair sample of the held-out text.
    dataset = PackedDataset(corpus, training.seq_len, VALIDATION_SEED, training.document_mask)
    return Loader(
        dataset,
        local_batch_size=batch.local,
        dp_rank=dp_rank,
        dp_size=dp_size,
        validation_steps=validation.steps,
    )


def _open_split(config: JobConfig, tokenizer: Tokenizer, split: str, report: bool) -> Corpus:
    training, validation = config.training, config.validation
    source = open_source(training.dataset, training.dataset_path)
    shared, section = True, "training"
    wanted = validation.enable or split == "validation"
    if wanted and (validation.dataset is not None or validation.dataset_path is not None):
        kind = training.dataset if validation.dataset is None else validation.dataset
        path = validation.dataset_path
        if path is None and kind != "stdlib":
            path = training.dataset_path
        other = open_source(kind, path, "validation")
        shared = (other.kind, other.root.resolve()) == (source.kind, source.root.resolve())
        if split == "validation" and not shared:
            source, section = other, "validation"
    held_out = shared and wanted
    corpora = open_corpus(
        source,
        tokenizer,
        Path(config.job.dump_folder) / "cache",
        fraction=validation.fraction if held_out else 0.0,
        skip_bad_records=training.skip_bad_records,
    )
    total = sum(corpus.num_documents for corpus in corpora.values())
    if not total:
        skipped = next(iter(corpora.values())).bad_records
        raise DataError(
            f"The dataset {str(source.root)!r} ({source.kind}) holds no text"
            f"{f', all {skipped} records are bad' if skipped else ''}: check {section}.dataset_path."
        )
    corpus = corpora[split if held_out else "train"]
    # A dataset that both splits share is reported once.
    if report and corpus.bad_records and (split == "train" or not held_out):
        logger.warning(
            "Skipped %d bad records of %s; the first: %s", corpus.bad_records, source.root, corpus.first_bad_record
        )
    if not corpus.num_documents:
        raise DataError(
            f"Of {total} documents in {str(source.root)!r} none falls in the {split} split with validation.fraction = "
            f"{validation.fraction}: choose another fraction, give validation.dataset_path, or split large files."
        )
    return corpus
