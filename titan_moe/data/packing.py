"""Documents packed into sequences of one length, with random access by sample number.

Each epoch puts the documents in a new order, lays them out as one stream, every document followed by the
end-of-sequence token, and cuts the stream into sequences; the sequences are then shuffled as well, so that
a batch does not come from one file. A sequence of S tokens reads S + 1 of the stream, the last one as a
label only, where the next sequence starts. What is left at the end, shorter than a sequence, is not used
in that epoch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from titan_moe.data.corpus import Corpus
from titan_moe.errors import DataError

IGNORED_LABEL = -100
PADDING_SAMPLE = -1


def permutation(n: int, *key: int) -> np.ndarray:
    """A random order of n things, int64 ``[n]``, that depends on n and the key alone.

    Built on the bit generator's raw output and a stable sort: numpy promises those for good, unlike
    ``Generator.permutation``.
    """
    seed = np.random.SeedSequence([part % 2**64 for part in key])
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable")


class _Epoch(NamedTuple):
    documents: np.ndarray  # document at each place of the stream
    ends: np.ndarray  # where in the stream each of them ends
    sequences: np.ndarray  # sequence at each place of the epoch


class PackedDataset:
    """Sample g is sequence ``g % sequences_per_epoch`` of epoch ``g // sequences_per_epoch``.

    An epoch's tables take 16 bytes per document and 8 per sequence; the last two epochs used are kept.

    Args:
        corpus: the tokenized documents.
        seq_len: tokens per sequence.
        seed: of the order of documents and sequences.
        document_mask: number the documents in ``document_ids`` from 0 in each sequence and ignore the label
            that would be another document's first token; without it all ids are 0 and no label is ignored.

    Raises:
        DataError: the corpus is empty or shorter than one sequence and its last label.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, document_mask: bool = True):
        self.corpus, self.seq_len, self.seed, self.document_mask = corpus, seq_len, seed, document_mask
        self.sequences_per_epoch = (corpus.num_tokens - 1) // seq_len
        if self.sequences_per_epoch < 1:
            raise DataError(
                f"The {corpus.split} data has {corpus.num_tokens} tokens in {corpus.num_documents} documents, fewer "
                f"than the {seq_len + 1} of one sequence and its last label: lower training.seq_len or add data."
            )
        self._epochs: dict[int, _Epoch] = {}

    def epoch(self, number: int) -> _Epoch:
        """The tables of an epoch. Called before worker processes are forked, they share the memory."""
        if number not in self._epochs:
            documents = permutation(self.corpus.num_documents, self.seed, number, 0)
            ends = np.cumsum(np.diff(self.corpus.offsets)[documents])
            sequences = permutation(self.sequences_per_epoch, self.seed, number, 1)
            kept = {old: tables for old, tables in self._epochs.items() if old == number - 1}
            self._epochs = {**kept, number: _Epoch(documents, ends, sequences)}
        return self._epochs[number]

    def __getitems__(self, samples: Sequence[int]) -> dict[str, np.ndarray]:
        """The batch of these samples: input_ids, labels and document_ids, each int64 ``[len(samples), seq_len]``.

        Sample ``PADDING_SAMPLE`` is all zeros with every label ignored.
        """
        shape = (len(samples), self.seq_len)
        inputs, labels, documents = np.zeros(shape, np.int64), np.empty(shape, np.int64), np.zeros(shape, np.int64)
        for row, sample in enumerate(samples):
            if sample == PADDING_SAMPLE:
                labels[row] = IGNORED_LABEL
                continue
            window, ids = self._window(sample)
            inputs[row], labels[row] = window[:-1], window[1:]
            if self.document_mask:
                documents[row] = ids[:-1]
                labels[row, ids[1:] != ids[:-1]] = IGNORED_LABEL
        return {"input_ids": inputs, "labels": labels, "document_ids": documents}

    def _window(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """The sample's seq_len + 1 tokens, and for each its document's number within the sample."""
        number, place = divmod(sample, self.sequences_per_epoch)
        epoch = self.epoch(number)
        start = int(epoch.sequences[place]) * self.seq_len
        stop = start + self.seq_len + 1
        first = np.searchsorted(epoch.ends, start, side="right")
        last = np.searchsorted(epoch.ends, stop, side="left")
        documents, ends = epoch.documents[first : last + 1], epoch.ends[first : last + 1]
        begins = self.corpus.offsets[documents]
        stream_begins = ends - (self.corpus.offsets[documents + 1] - begins)
        pieces = np.minimum(ends, stop) - np.maximum(stream_begins, start)
        # Token at stream place p of a document lies at p plus this shift in the corpus.
        places = np.arange(start, stop) + np.repeat(begins - stream_begins, pieces)
        return self.corpus.tokens[places], np.repeat(np.arange(len(documents)), pieces)
