"""Documents read from every kind of dataset, and each way a dataset can be broken."""

import builtins
import json
import os
import sysconfig
from pathlib import Path

import pytest

from titan_moe.data.sources import BadRecords, open_source
from titan_moe.errors import ConfigError, DataError


def read(kind, path, skip=False):
    bad = BadRecords(skip)
    return dict(open_source(kind, path).documents(bad)), bad


def test_stdlib_holds_the_interpreters_own_sources_without_its_tests():
    documents, _ = read("stdlib", None)
    root = Path(sysconfig.get_path("stdlib"))
    assert documents["argparse.py"] == (root / "argparse.py").read_bytes().decode()
    assert "json/decoder.py" in documents
    parts = {part for key in documents for part in key.split("/")}
    assert not parts & {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}
    assert list(documents) == sorted(documents, key=lambda key: key.split("/"))
    assert sum(len(text) for text in documents.values()) > 5e6


def test_stdlib_refuses_a_path_instead_of_ignoring_it(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset_path = .* is not used by dataset 'stdlib'"):
        open_source("stdlib", tmp_path)


def test_text_file_and_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_bytes("zwei ü\r\n".encode())
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    assert read("text", tmp_path)[0] == {"a.txt": "one", "b/two.md": "zwei ü\r\n"}
    assert read("text", str(tmp_path / "a.txt"))[0] == {"a.txt": "one"}


def test_text_that_is_not_utf8_names_file_and_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\xff")
    (tmp_path / "b.txt").write_text("ok")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text at byte 4 .*skip_bad_records = true"):
        read("text", tmp_path)
    documents, bad = read("text", tmp_path, skip=True)
    assert documents == {"b.txt": "ok"} and bad.count == 1


BROKEN_LINES = {
    b'{"text": "cut off': "not valid JSON",
    b'{"body": "x"}': "no field 'text' (fields: body)",
    b'{"text": 3}': "'text' is int, not a string",
    b'{"text": null}': "'text' is null, not a string",
    b'["text"]': "a JSON object is expected, found list",
    b'{"text": "\xff"}': "not UTF-8 at byte 10 of the line",
    b'{"text": "a\\ud800"}': "lone surrogate at character 1",
}


@pytest.mark.parametrize("line", BROKEN_LINES)
def test_broken_jsonl_line_is_an_error_with_file_and_line_or_skipped(tmp_path, line):
    file = tmp_path / "part.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n' + line + b'\n{"text": "four"}')
    with pytest.raises(DataError) as error:
        read("jsonl", tmp_path)
    assert str(error.value).startswith(f"{file}:3: ") and BROKEN_LINES[line] in str(error.value)
    assert "\n" not in str(error.value)
    documents, bad = read("jsonl", tmp_path, skip=True)
    assert documents == {"part.jsonl:1": "one", "part.jsonl:4": "four"}
    assert bad.count == 1 and bad.first.startswith(f"{file}:3: ")


def test_jsonl_folder_reads_only_jsonl_files(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "hi", "other": 1}) + "\n")
    (tmp_path / "readme.txt").write_text("no json")
    assert read("jsonl", tmp_path)[0] == {"x.jsonl:1": "hi"}


def test_parquet_rows_and_a_null_among_them(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "text": ["one", None, "three"]}), file)
    with pytest.raises(DataError, match=r"a\.parquet, row 2: 'text' is null"):
        read("parquet", file)
    documents, bad = read("parquet", tmp_path, skip=True)
    assert documents == {"a.parquet:1": "one", "a.parquet:3": "three"} and bad.count == 1


def test_parquet_with_no_usable_text_column(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'text' \(columns: body\)"):
        read("parquet", tmp_path)
    pq.write_table(pa.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'text' is int64"):
        read("parquet", tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read("parquet", tmp_path)


def test_huggingface_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["one", "two", None], "id": [1, 2, 3]})
    data.select([1, 0]).save_to_disk(str(tmp_path / "plain"))
    assert read("huggingface", tmp_path / "plain")[0] == {"plain:1": "two", "plain:2": "one"}
    data.save_to_disk(str(tmp_path / "hole"))
    with pytest.raises(DataError, match="hole, row 3: 'text' is null"):
        read("huggingface", tmp_path / "hole")
    datasets.DatasetDict({"train": data.select([0])}).save_to_disk(str(tmp_path / "splits"))
    assert read("huggingface", tmp_path / "splits")[0] == {"splits/train:1": "one"}
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "test_only"))
    with pytest.raises(DataError, match=r"no split 'train' \(splits: test\)"):
        read("huggingface", tmp_path / "test_only")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.json").write_text("{}")
    with pytest.raises(DataError, match="not a folder made by save_to_disk"):
        read("huggingface", tmp_path / "other")


@pytest.mark.parametrize(
    ("kind", "module", "extra"), [("parquet", "pyarrow", "parquet"), ("huggingface", "datasets", "hf")]
)
def test_missing_optional_library_names_what_to_install(tmp_path, monkeypatch, kind, module, extra):
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "state.json").write_text("{}")
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == module:
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=rf"needs {module}: pip install 'titan_moe\[{extra}\]'"):
        read(kind, tmp_path)


def test_unknown_kind_names_the_nearest():
    with pytest.raises(ConfigError, match=r"training\.dataset = 'jsonll' .* Did you mean 'jsonl'\?"):
        open_source("jsonll", None)


def test_paths_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset = 'text' needs training\.dataset_path"):
        open_source("text", None)
    with pytest.raises(ConfigError, match=r"no file or folder '.*nowhere'"):
        open_source("text", tmp_path / "nowhere")
    for kind in ("text", "jsonl", "parquet", "huggingface"):
        with pytest.raises(ConfigError, match=f"holds no .* file for dataset '{kind}'"):
            open_source(kind, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; dataset 'huggingface' reads a folder"):
        open_source("huggingface", tmp_path / "file")


def test_a_file_that_vanishes_after_listing_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    source = open_source("text", tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"Cannot read '.*a\.txt': No such file"):
        list(source.documents(BadRecords()))


def test_fingerprint_changes_with_size_time_and_place_but_keys_do_not(tmp_path):
    (tmp_path / "one").mkdir()
    file = tmp_path / "one" / "a.txt"
    file.write_text("x")
    seen = [open_source("text", tmp_path / "one").fingerprint()]
    assert open_source("text", f"{tmp_path}/one/../one").fingerprint() == seen[0]
    os.utime(file, ns=(1, 1))
    seen.append(open_source("text", tmp_path / "one").fingerprint())
    file.write_text("xy")
    os.utime(file, ns=(1, 1))
    seen.append(open_source("text", tmp_path / "one").fingerprint())
    (tmp_path / "one").rename(tmp_path / "two")
    seen.append(open_source("text", tmp_path / "two").fingerprint())
    assert all(seen.count(one) == 1 for one in seen)
    assert list(read("text", tmp_path / "two")[0]) == ["a.txt"]
