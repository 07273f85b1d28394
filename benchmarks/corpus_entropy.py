"""How predictable the held-out text is without a model: the yardstick for a validation loss per byte.

Prints cross-entropies in nats per byte on the validation split of a dataset: byte n-grams counted on the
training split, with Witten-Bell interpolation down to the uniform distribution, and what general
compressors reach on the held-out text alone.

    python benchmarks/corpus_entropy.py [--dataset stdlib] [--dataset_path PATH] [--fraction 0.05]
"""

import argparse
import bz2
import gzip
import lzma
import math

import numpy as np

from titan_moe.data.corpus import in_validation_split
from titan_moe.data.sources import BadRecords, open_source


def grams(texts: list[bytes], n: int) -> np.ndarray:
    """The n-gram that ends at each byte, as one integer; before a document lie zero bytes."""
    pad = b"\0" * (n - 1)
    stream = np.frombuffer(b"".join(pad + text for text in texts), np.uint8).astype(np.uint64)
    codes = np.zeros(len(stream) - n + 1, np.uint64)
    for at in range(n):
        codes = codes << np.uint64(8) | stream[at : at + len(codes)]
    # An n-gram that ends in another document's padding predicts nothing that exists.
    starts = np.cumsum([0, *(len(text) + n - 1 for text in texts[:-1])])
    keep = np.ones(len(stream), bool)
    for at in range(n - 1):
        keep[starts + at] = False
    return codes[keep[n - 1 :]]


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is unknown."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def cross_entropies(train: list[bytes], held_out: list[bytes], order: int) -> list[float]:
    """Nats per byte of the n-gram models up to the order."""
    probability, found = 1 / 256, []
    for n in range(1, order + 1):
        keys, counts = np.unique(grams(train, n), return_counts=True)
        contexts, first = np.unique(keys >> np.uint64(8), return_index=True)
        followers, totals = np.diff([*first, len(keys)]), np.add.reduceat(counts, first)
        wanted = grams(held_out, n)
        seen = look_up(keys, counts, wanted)
        context = wanted >> np.uint64(8)
        new, total = look_up(contexts, followers, context), look_up(contexts, totals, context)
        known = total > 0
        mixed = (seen + new * probability) / np.where(known, total + new, 1)
        probability = np.where(known, mixed, probability)
        found.append(float(-np.log(probability).mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="stdlib", help="kind of dataset")
    parser.add_argument("--dataset_path", help="file or folder, where the kind needs one")
    parser.add_argument("--fraction", type=float, default=0.05, help="share of the documents held out")
    parser.add_argument("--order", type=int, default=5, choices=range(1, 9), help="longest n-gram, in bytes")
    options = parser.parse_args()
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    for key, text in open_source(options.dataset, options.dataset_path).documents(BadRecords()):
        if text:
            splits[in_validation_split(key, options.fraction)].append(text.encode("utf-8"))
    for name, texts in zip(("train", "validation"), splits, strict=True):
        print(f"{name}: {len(texts)} documents, {sum(map(len, texts))} bytes")
        if not texts:
            raise SystemExit(f"Nothing falls in the {name} split: choose another --fraction.")
    print("nats per byte of the validation text:")
    for n, nats in enumerate(cross_entropies(*splits, options.order), start=1):
        print(f"  {n}-gram  {nats:.3f}")
    text = b"".join(splits[1])
    compressors = {"gzip -9": gzip.compress, "bzip2 -9": bz2.compress, "lzma": lambda t: lzma.compress(t, preset=9)}
    for name, compress in compressors.items():
        print(f"  {name}  {len(compress(text)) * 8 * math.log(2) / len(text):.3f}")


if __name__ == "__main__":
    main()
