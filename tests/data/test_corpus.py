"""The token cache: what is in it, when it is reused or rebuilt, and who builds it."""

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from titan_moe.data.corpus import Corpus, in_validation_split, open_corpus
from titan_moe.data.sources import open_source
from titan_moe.data.tokenizer import ByteTokenizer
from titan_moe.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """Forty small documents, one of them empty."""
    root = tmp_path / "text"
    root.mkdir()
    for index in range(40):
        (root / f"{index:02}.txt").write_text(f"document {index} " * (index % 5))
    return root


class CountingTokenizer(ByteTokenizer):
    def __init__(self):
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return super().encode_batch(texts)


def documents_of(corpus):
    return [corpus.tokens[a:b].tolist() for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)]


def test_both_splits_hold_each_document_once_with_its_eos(folder, tmp_path):
    splits = open_corpus(open_source("text", folder), ByteTokenizer(), tmp_path / "cache", fraction=0.3)
    texts = {file.name: file.read_text() for file in sorted(folder.iterdir()) if file.read_text()}
    assert len(texts) == 32
    for name, held_out in (("train", False), ("validation", True)):
        expected = [text for key, text in texts.items() if in_validation_split(key, 0.3) == held_out]
        corpus = splits[name]
        assert documents_of(corpus) == [[*text.encode(), 256] for text in expected]
        assert corpus.num_documents == len(expected) > 0
        assert corpus.num_bytes == sum(map(len, expected))
        assert corpus.num_tokens == corpus.num_bytes + len(expected)
        assert corpus.tokens.dtype == np.uint16 and not corpus.tokens.flags.writeable


def test_without_a_fraction_everything_is_training_data(folder, tmp_path):
    splits = open_corpus(open_source("text", folder), ByteTokenizer(), tmp_path / "cache")
    assert list(splits) == ["train"] and splits["train"].num_documents == 32


def test_large_vocabulary_is_stored_in_32_bits(folder, tmp_path):
    class Large(ByteTokenizer):
        vocab_size, eos_id, identity = 70_000, 69_999, "large"

    corpus = open_corpus(open_source("text", folder), Large(), tmp_path / "cache")["train"]
    assert corpus.tokens.dtype == np.uint32
    assert documents_of(corpus)[0] == [*b"document 1 ", 69_999]


def test_split_is_stable_and_grows_with_the_fraction():
    keys = [f"file_{index}.py" for index in range(2000)]
    assert [key for key in keys[:100] if in_validation_split(key, 0.05)] == [f"file_{i}.py" for i in PINNED]
    small, large = ({key for key in keys if in_validation_split(key, f)} for f in (0.05, 0.2))
    assert small < large
    # Binomial with 2000 draws: five standard deviations are 0.024 and 0.045.
    assert abs(len(small) / 2000 - 0.05) < 0.025 and abs(len(large) / 2000 - 0.2) < 0.045


# Those of the first hundred with sha256(key) below 0.05 of its range; a change would mix held-out text into training.
PINNED = [3, 9, 56, 57, 60, 93]


def test_cache_is_reused_until_something_it_depends_on_changes(folder, tmp_path):
    cache, tokenizer = tmp_path / "cache", CountingTokenizer()

    def builds(**options):
        before = tokenizer.calls
        open_corpus(open_source("text", folder), tokenizer, cache, **options)
        return tokenizer.calls - before

    assert builds() == 1
    assert builds() == 0
    assert builds(fraction=0.3) == 1
    assert builds(skip_bad_records=True) == 1
    tokenizer.identity = "another"
    assert builds() == 1
    (folder / "00.txt").write_text("changed")
    assert builds() == 1
    assert builds() == 0


def spoil_meta(cache):
    (cache / "meta.json").write_text('{"version": 1, "dty')


def spoil_tokens(cache):
    os.truncate(cache / "train.tokens.bin", 10)


def spoil_offsets(cache):
    os.truncate(cache / "train.offsets.npy", 100)


def swap_offsets(cache):
    np.save(cache / "train.offsets.npy", np.arange(7))


def pickle_offsets(cache):
    np.save(cache / "train.offsets.npy", np.array([{}], dtype=object), allow_pickle=True)


def lose_tokens(cache):
    (cache / "train.tokens.bin").unlink()


def lose_meta(cache):
    (cache / "meta.json").unlink()


def change_tokens(cache):
    # Ids beyond the vocabulary of 257, in a file of the right size.
    with open(cache / "train.tokens.bin", "r+b") as file:
        file.write(b"\xff\xff")


def change_offsets(cache):
    offsets = np.load(cache / "train.offsets.npy")
    offsets[1] = 10**12
    np.save(cache / "train.offsets.npy", offsets)


def change_meta(cache):
    meta = json.loads((cache / "meta.json").read_text())
    meta["splits"]["train"]["bytes"] += 1
    (cache / "meta.json").write_text(json.dumps(meta))


def replace_meta(cache):
    (cache / "meta.json").write_text("[]")


@pytest.mark.parametrize(
    "spoil",
    [
        *(spoil_meta, spoil_tokens, spoil_offsets, swap_offsets, pickle_offsets, lose_tokens, lose_meta),
        *(change_tokens, change_offsets, change_meta, replace_meta),
    ],
)
def test_damaged_cache_is_rebuilt_and_says_so(folder, tmp_path, spoil, caplog):
    source = open_source("text", folder)
    corpus = open_corpus(source, ByteTokenizer(), tmp_path / "cache")["train"]
    before = documents_of(corpus)
    spoil(corpus.folder)
    with caplog.at_level(logging.WARNING):
        again = open_corpus(source, ByteTokenizer(), tmp_path / "cache")["train"]
    assert documents_of(again) == before
    assert again.num_bytes == corpus.num_bytes
    (line,) = caplog.messages
    assert line.startswith(f"Rebuilding the damaged token cache {corpus.folder} (")


def test_interrupted_build_leaves_nothing_and_a_killed_ones_remains_are_removed(folder, tmp_path):
    class Interrupted(ByteTokenizer):
        def encode_batch(self, texts):
            raise KeyboardInterrupt

    source, cache = open_source("text", folder), tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        open_corpus(source, Interrupted(), cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    corpus = open_corpus(source, ByteTokenizer(), cache)["train"]
    remains = cache / f"{corpus.folder.name}.12345.tmp"
    shutil.move(corpus.folder, remains)
    open_corpus(source, ByteTokenizer(), cache)
    assert sorted(path.name for path in cache.iterdir()) == [corpus.folder.name, f"{corpus.folder.name}.lock"]


class SlowTokenizer(ByteTokenizer):
    """Leaves a mark for every build, and takes long enough for the others to arrive."""

    def __init__(self, marks):
        self.marks = marks

    def encode_batch(self, texts):
        (self.marks / str(os.getpid())).touch()
        time.sleep(0.5)
        return super().encode_batch(texts)


def _open_in_process(folder, cache, marks, results):
    corpus = open_corpus(open_source("text", folder), SlowTokenizer(marks), cache)["train"]
    results.put(documents_of(corpus))


def test_of_several_processes_one_builds_and_all_read_the_same(folder, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (folder, tmp_path / "cache", marks, results)
    processes = [context.Process(target=_open_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    assert len(list(marks.iterdir())) == 1
    assert found[0] == found[1] == found[2] and len(found[0]) == 32


def test_bad_records_are_counted_and_the_count_survives_in_the_cache(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\nbroken\n{"text": 5}\n')
    source = open_source("jsonl", file)
    for _ in range(2):
        corpus = open_corpus(source, ByteTokenizer(), tmp_path / "cache", skip_bad_records=True)["train"]
        assert corpus.bad_records == 2 and corpus.num_documents == 1
        assert corpus.first_bad_record.startswith(f"{file}:2: not valid JSON")
    # A cache made by skipping does not serve a run that does not skip.
    with pytest.raises(DataError, match=r"data\.jsonl:2"):
        open_corpus(source, ByteTokenizer(), tmp_path / "cache")


def test_a_number_beyond_pythons_digits_makes_a_bad_record(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two", "n": ' + "1" * 5000 + "}\n")
    source = open_source("jsonl", file)
    with pytest.raises(DataError, match=r"data\.jsonl:2: .*too many digits.*skip_bad_records"):
        open_corpus(source, ByteTokenizer(), tmp_path / "cache")
    corpus = open_corpus(source, ByteTokenizer(), tmp_path / "cache", skip_bad_records=True)["train"]
    assert corpus.bad_records == 1 and corpus.num_documents == 1


def test_cache_folder_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"Cannot write the token cache .*File exists.*job\.dump_folder"):
        open_corpus(open_source("text", folder), ByteTokenizer(), tmp_path / "cache")


FULL_DISK = """
import resource, sys
from pathlib import Path
from titan_moe.data.corpus import open_corpus
from titan_moe.data.sources import open_source
from titan_moe.data.tokenizer import ByteTokenizer
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    open_corpus(open_source("text", sys.argv[1]), ByteTokenizer(), Path(sys.argv[2]))
except ValueError as error:
    print(type(error).__name__, error)
"""


def test_no_room_while_writing_is_one_line_and_leaves_no_cache(folder, tmp_path):
    cache = tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, folder, cache], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("DataError Cannot write the token cache"), done.stderr
    assert "File too large" in done.stdout
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_corpus_is_sent_to_other_processes_by_name_not_by_content(folder, tmp_path):
    corpus = open_corpus(open_source("text", folder), ByteTokenizer(), tmp_path / "cache")["train"]
    reopened, arguments = corpus.__reduce__()
    assert reopened is Corpus and documents_of(reopened(*arguments)) == documents_of(corpus)
    assert json.loads((corpus.folder / "meta.json").read_text())["splits"]["train"]["documents"] == 32
