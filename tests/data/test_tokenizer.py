"""Tokenizers: round trips, the end-of-sequence token and the bytes behind each token."""

import json

import pytest

from titan_moe.data import build_tokenizer, train_tokenizer
from titan_moe.errors import ConfigError, DataError

TEXTS = ["def f(x):\n    return x + 1\n", "naïve 東京 🙂", "  spaces\t\t and \r\n", "a" * 300, "\x00\x7f"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"def function_{index}(self):\n    return self.value + {index}\n" * 5)
    return folder


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(dataset="text", dataset_path=str(corpus), vocab_size=300, output=str(folder))
    return folder


@pytest.fixture(params=["bytes", "trained"])
def tokenizer(request, trained):
    return build_tokenizer("bytes" if request.param == "bytes" else str(trained))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_token_bytes_add_up_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    lengths = tokenizer.token_bytes()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths.dtype.is_signed
    assert lengths[ids].sum().item() == len(text.encode("utf-8"))
    assert lengths[tokenizer.eos_id] == 0
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_a_saved_tokenizer_is_the_same_one(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    if tokenizer.identity == "bytes":
        assert not list(tmp_path.iterdir())
    else:
        assert build_tokenizer(str(tmp_path)).identity == tokenizer.identity


def test_encode_batch_is_encode_of_each(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == tokenizer.encode(text)


def test_bytes_are_bytes():
    tokenizer = build_tokenizer("bytes")
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_trained_tokenizer_has_merges_and_is_what_transformers_reads(trained, capsys):
    tokenizer = build_tokenizer(str(trained / "tokenizer.json"))
    assert tokenizer.vocab_size == 300 and tokenizer.eos_id == 0
    assert len(tokenizer.encode("def function_1(self):")) < 10
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(trained))
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs(TEXTS[1])["input_ids"] == tokenizer.encode(TEXTS[1])


def test_training_prints_where_it_wrote(corpus, tmp_path, capsys):
    path = train_tokenizer(dataset="text", dataset_path=str(corpus), vocab_size=260, output=str(tmp_path / "new" / "t"))
    assert f"Wrote {path}: 260 tokens from 20 documents." in capsys.readouterr().out


def test_training_refuses_what_cannot_work(corpus, tmp_path):
    with pytest.raises(ConfigError, match="vocab_size = 256 is too small"):
        train_tokenizer(vocab_size=256, output=str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Cannot write to"):
        train_tokenizer(dataset="text", dataset_path=str(corpus), output=str(tmp_path / "file"))
    with pytest.raises(DataError, match="holds no text"):
        train_tokenizer(dataset="text", dataset_path=str(tmp_path / "file"), output=str(tmp_path / "out"))
    (tmp_path / "x.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"x\.jsonl:1: not valid JSON"):
        train_tokenizer(dataset="jsonl", dataset_path=str(tmp_path), output=str(tmp_path / "out"))


def word_level(folder, vocab, config=None):
    """A minimal tokenizer.json with this vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "eos"),
    [
        (None, 2),
        ({}, 2),
        ({"eos_token": "<stop>"}, 1),
        ({"eos_token": {"content": "<stop>"}}, 1),
        ({"eos_token": None}, 2),
    ],
)
def test_eos_from_the_config_beside_it_else_from_its_name(tmp_path, config, eos):
    tokenizer = build_tokenizer(word_level(tmp_path, {"a": 0, "<stop>": 1, "</s>": 2, "b": 9}, config))
    assert tokenizer.eos_id == eos
    assert tokenizer.vocab_size == 10  # holes in the numbering count
    assert tokenizer.encode("a b a b") == [0, 9, 0, 9]  # the file's truncation is off


def test_byte_fallback_vocabulary_counts_its_bytes(tmp_path):
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {"</s>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁": 257, "a": 258, "▁a": 259}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(str(tmp_path))
    text = "a a🙂 é"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes()[tokenizer.encode(text)].sum().item() == len(text.encode())


def test_unusable_tokenizers(tmp_path):
    with pytest.raises(DataError, match=r"model\.tokenizer = 'byte' .* Did you mean 'bytes'\?"):
        build_tokenizer("byte")
    with pytest.raises(DataError, match=r"no file '.*tokenizer\.json'"):
        build_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="no file"):
        build_tokenizer(str(tmp_path / "x.json"))
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        build_tokenizer(word_level(tmp_path, {"a": 0}))
    with pytest.raises(DataError, match=r"eos_token '<x>' is not in the vocabulary"):
        build_tokenizer(word_level(tmp_path, {"a": 0}, {"eos_token": "<x>"}))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match="not a readable JSON object"):
        build_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(DataError, match=r"not a readable tokenizer\.json"):
        build_tokenizer(str(tmp_path))
