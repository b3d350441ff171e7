from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from moesys.data import Tokenizer, bytes_tokenizer, train_bpe

TEXTS = [
    "def f(x):\n    return x  # naïve\n" * 20,
    "日本語のテキスト and 😀 emoji\n" * 10,
    "aaaa bbbb aaaa\r\n\t",
]
# Unicode text without surrogates, which no UTF-8 can hold.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS, 300)


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory) -> Tokenizer:
    """A tokenizer of the SentencePiece kind, with a byte for what it does not know."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>", *byte_names], show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat"] * 20, trainer)
    content = json.loads(backend.to_str())
    # SentencePiece's byte entries are ordinary vocabulary, not special.
    content["added_tokens"] = content["added_tokens"][:2]
    path = tmp_path_factory.mktemp("spm") / "tokenizer.json"
    path.write_text(json.dumps(content))
    return Tokenizer.load(path)


@settings(deadline=None)
@given(text=ANY_TEXT)
def test_round_trip_is_exact(bpe, text):
    for tokenizer in (bpe, bytes_tokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())
        assert tokenizer.eot_id not in ids
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_bytes_are_their_own_ids():
    tokenizer = bytes_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert tokenizer.encode_batch(["a", ""]) == [[97], []]
    assert tokenizer.decode([104, 105, 256]) == "hi"


def test_saved_tokenizers_come_back_and_are_read_by_the_library(bpe, tmp_path):
    for tokenizer in (bpe, bytes_tokenizer()):
        path = tmp_path / "tokenizer.json"
        tokenizer.save(path)
        loaded = Tokenizer.load(path)
        library = tokenizers.Tokenizer.from_file(str(path))
        assert loaded.to_json() == tokenizer.to_json()
        assert (loaded.eot_id, loaded.vocab_size) == (tokenizer.eot_id, tokenizer.vocab_size)
        for text in TEXTS:
            assert loaded.encode(text) == tokenizer.encode(text) == library.encode(text).ids
            assert library.decode(loaded.encode(text)) == text


def test_bpe_has_the_size_asked_for_and_does_not_depend_on_order(bpe):
    assert bpe.vocab_size == 300
    assert bpe.to_json() == train_bpe(TEXTS[::-1], 300).to_json()
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
    assert train_bpe(["ab"], 300).vocab_size == 258  # 256 bytes, end-of-text, and the one pair there is


def test_bpe_refuses_fewer_entries_than_bytes():
    with pytest.raises(
        ValueError, match=r"at least 257 .* model.vocab_size is 256; raise --model.vocab-size"
    ):
        train_bpe(TEXTS, 256)


def test_text_that_spells_end_of_text_stays_text(bpe, tmp_path):
    bpe.save(tmp_path / "t.json")
    for tokenizer in (bpe, bytes_tokenizer(), Tokenizer.load(tmp_path / "t.json")):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot_id not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"
        assert tokenizer.decode([*ids[:1], tokenizer.eot_id, *ids[-1:]]) == "ab"


def test_stream_holds_back_half_a_character():
    stream = bytes_tokenizer().stream()
    assert [stream.push(byte) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert stream.push(0xF0) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_ids_beyond_the_entries_stand_for_nothing(bpe):
    assert bpe.decode([bpe.vocab_size + 5]) == ""


def test_settings_that_would_alter_documents_are_lifted(bpe, tmp_path):
    backend = tokenizers.Tokenizer.from_str(bpe.to_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "t.json"))
    assert Tokenizer.load(tmp_path / "t.json").encode(TEXTS[0]) == bpe.encode(TEXTS[0])
    assert Tokenizer.load(tmp_path / "t.json").encode("") == []


def test_other_kinds_of_tokenizer(sentencepiece_like):
    tokenizer = sentencepiece_like
    text = "the cat é on mat 😀 sat"
    ids = tokenizer.encode(text)
    assert tokenizer.eot_id == 1 and not tokenizer.byte_level
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pushed = [stream.push(token) for token in ids]
    assert "".join(pushed) + stream.finish() == text
    assert "" in pushed and not any("\N{REPLACEMENT CHARACTER}" in part for part in pushed)
    # The one byte too many is the space that this kind puts before a text.
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode()) + 1


def test_long_streams_of_other_kinds(sentencepiece_like):
    text = " ".join(["the mat", "cat é"] * 40)
    stream = sentencepiece_like.stream()
    assert "".join(map(stream.push, sentencepiece_like.encode(text))) + stream.finish() == text


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.json; give 'bpe', 'bytes' or the path"):
        Tokenizer.load(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "bad.json")
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.save(str(tmp_path / "no_eot.json"))
    with pytest.raises(ValueError, match=r"no end-of-text entry .*</s>.*add_special_tokens\(\["):
        Tokenizer.load(tmp_path / "no_eot.json")


def test_byte_counts_are_only_promised_where_they_hold(bpe, tmp_path, open_source):
    backend = tokenizers.Tokenizer.from_str(bpe.to_json())
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(tmp_path / "lower.json"))
    backend.normalizer = normalizers.NFD()
    backend.save(str(tmp_path / "nfd.json"))
    folder = tmp_path / "text"
    folder.mkdir()
    for k in range(12):
        (folder / f"{k}.txt").write_text(f"Ein größeres Haus {k}\n" * 3)
    for name, exact in (("lower", True), ("nfd", False)):
        data = open_source(folder, tokenizer=str(tmp_path / f"{name}.json"))
        assert data.train.dataset.exact_bytes is exact
        assert data.validation.exact_bytes is exact
        # What is in the files counts, not what the tokenizer made of it.
        assert data.validation.num_bytes == sum(
            len(f"Ein größeres Haus {k}\n".encode()) * 3 for k in range(12) if held_out(f"{k}.txt")
        )


def held_out(name: str) -> bool:
    from moesys.data.split import is_held_out

    return is_held_out(name, 0.3)
