"""The n-gram yardstick of benchmarks/corpus_entropy.py against counts in dictionaries."""

import math
from collections import Counter, defaultdict

import pytest
from benchmark_files import load_benchmark


def test_cross_entropies_are_witten_bell_and_documents_do_not_see_each_other():
    train, held_out = [b"abracadabra", b"cab", b"a"], [b"abba", b"zab"]
    tables = defaultdict(Counter)
    for text in train:
        padded = b"\0\0" + text
        for at in range(2, len(padded)):
            for n in range(3):
                tables[padded[at - n : at]][padded[at]] += 1 if n else 0
            tables[b""][padded[at]] += 1

    def probability(context, byte):
        lower = probability(context[1:], byte) if context else 1 / 256
        table = tables.get(context)
        if not table:
            return lower
        return (table[byte] + len(table) * lower) / (table.total() + len(table))

    assert sum(probability(b"ab", byte) for byte in range(256)) == pytest.approx(1, abs=1e-12)
    expected = []
    for n in range(3):
        logs = [
            -math.log(probability((b"\0\0" + text)[at + 2 - n : at + 2], text[at]))
            for text in held_out
            for at in range(len(text))
        ]
        expected.append(sum(logs) / len(logs))
    # The same sums in another order of float64 operations.
    assert load_benchmark("corpus_entropy").cross_entropies(train, held_out, 3) == pytest.approx(expected, abs=1e-12)
