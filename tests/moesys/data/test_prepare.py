from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch

from moesys.data import Tokenizer, open_text, prepare, readers
from moesys.data.prepare import sample
from moesys.data.readers import Piece
from moesys.data.split import is_held_out


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "text"
    path.mkdir()
    for k in range(40):
        (path / f"{k:02}.txt").write_text(f"document {k} says größer {k} times\n" * (k + 1))
    return path


def documents(dataset, tokenizer) -> list[str]:
    stream = dataset.read(0, dataset.num_tokens).tolist()
    starts = [k for k, token in enumerate(stream) if token == tokenizer.eot_id]
    assert starts == dataset.offsets[:-1].tolist()
    ends = [*starts[1:], len(stream)]
    return [tokenizer.decode(stream[a + 1 : b]) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_documents_are_split_by_name_and_kept_whole(folder, open_source, tokenizer):
    data = open_source(folder, tokenizer=tokenizer)
    files = sorted(folder.iterdir())
    train = [file.read_text() for file in files if not is_held_out(file.name, 0.3)]
    held_out = [file.read_text() for file in files if is_held_out(file.name, 0.3)]
    assert len(train) > 5 and len(held_out) > 5
    assert documents(data.train.dataset, data.tokenizer) == train
    assert documents(data.validation, data.tokenizer) == held_out
    assert data.train.dataset.num_bytes == sum(len(text.encode()) for text in train)
    assert data.validation.document_bytes.tolist() == [len(text.encode()) for text in held_out]
    assert data.train.dataset.exact_bytes and data.validation.exact_bytes
    assert data.tokenizer.vocab_size == {"bytes": 257, "bpe": 300}[tokenizer]
    size = sum(len(text.encode()) for text in held_out) / 1e3
    held = f"{len(held_out)} documents, {size:.1f} kB, {data.validation.num_tokens:,} tokens held out"
    assert data.description.startswith(f"{folder}: {len(train)} documents, ")
    assert data.description.endswith(held)


def test_the_split_of_a_document_does_not_depend_on_the_others(folder, open_source):
    before = open_source(folder)
    held_out = documents(before.validation, before.tokenizer)
    for k in range(0, 40, 2):
        (folder / f"{k:02}.txt").unlink()
    (folder / "more.txt").write_text("more")
    after = open_source(folder)
    assert set(documents(after.validation, after.tokenizer)) - {"more"} <= set(held_out)
    assert not set(documents(after.train.dataset, after.tokenizer)) & set(held_out)


def test_equal_rows_fall_on_the_same_side(tmp_path, open_source):
    rows = [f"row {k % 30} is here twice or more" for k in range(90)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = open_source(path)
    train = documents(data.train.dataset, data.tokenizer)
    held_out = documents(data.validation, data.tokenizer)
    assert sorted(train + held_out) == sorted(rows)
    assert held_out and not set(train) & set(held_out)


def test_validation_of_its_own(folder, tmp_path, open_source):
    other = tmp_path / "other.txt"
    other.write_text("held out")
    data = open_source(folder, validation=str(other))
    assert documents(data.validation, data.tokenizer) == ["held out"]
    assert data.train.dataset.num_documents == 40


def test_validation_may_not_be_part_of_the_training_text(folder, open_source):
    with pytest.raises(ValueError, match=r"03\.txt is also among the files of data\.source"):
        open_source(folder, validation=str(folder / "03.txt"))


def test_documents_that_all_fall_on_one_side(tmp_path, open_source):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}, which is long enough")
    with pytest.raises(
        ValueError, match=r"3 document\(s\); data\.held_out 0\.01 .*--data\.validation PATH"
    ) as error:
        open_source(tmp_path, held_out=0.01)
    share = re.search(r"set --data\.held-out ([\d.]+) for instance", str(error.value))
    assert share is not None
    data = open_source(tmp_path, held_out=float(share[1]))
    assert data.train.dataset.num_documents + data.validation.num_documents == 3
    (tmp_path / "a.jsonl").write_text('{"text": "row one"}\n{"text": "row two"}\n')
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(
            ValueError, match=r"2 document\(s\); data\.held_out 1e-06 .*change --data\.held-out"
        ):
            open_source(tmp_path / "a.jsonl", tokenizer=tokenizer, held_out=1e-6)


def test_text_that_is_all_empty_is_named(tmp_path, open_source):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(ValueError, match=r"a\.jsonl holds no text"):
            open_source(tmp_path / "a.jsonl", tokenizer=tokenizer)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"a\.txt holds no text"):
        open_text(
            str(tmp_path / "a.txt"), Tokenizer.load(saved_bytes(tmp_path)), cache=str(tmp_path / "cache")
        )


def saved_bytes(folder):
    from moesys.data import bytes_tokenizer

    bytes_tokenizer().save(folder / "bytes.json")
    return folder / "bytes.json"


def test_held_out_must_be_a_share(folder, open_source):
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match=r"data\.held_out is a share between 0 and 1"):
            open_source(folder, held_out=share)


def test_a_vocabulary_larger_than_the_model_is_refused(folder, open_source):
    with pytest.raises(
        ValueError, match=r"has 257 entries, model\.vocab_size is 256: set --model\.vocab-size 257"
    ):
        open_source(folder, vocab_size=256)


def test_the_bpe_is_trained_on_training_text_only(tmp_path, open_source):
    path = tmp_path / "text"
    path.mkdir()
    for k in range(40):
        word = "secret" if is_held_out(f"{k}.txt", 0.3) else "public"
        (path / f"{k}.txt").write_text(f"{word} " * 50)
    tokenizer = open_source(path, tokenizer="bpe").tokenizer
    assert len(tokenizer.encode(" public")) == 1
    assert len(tokenizer.encode(" secret")) > 4


def test_opening_again_reads_the_cache_and_gives_the_same(folder, open_source, monkeypatch):
    first = open_source(folder, tokenizer="bpe")
    monkeypatch.setattr(readers, "text_file", None)
    second = open_source(folder, tokenizer="bpe")
    assert torch.equal(first.train.batch(7, 5).tokens, second.train.batch(7, 5).tokens)
    assert isinstance(second.train.dataset.tokens, np.memmap)
    assert second.train.dataset.tokens.dtype == np.uint16
    monkeypatch.undo()
    (folder / "00.txt").write_text("changed")
    assert documents(open_source(folder).train.dataset, open_source(folder).tokenizer)[0] == "changed"


def test_a_given_tokenizer_is_used_as_it_is(folder, tmp_path, open_source, monkeypatch):
    first = open_source(folder, tokenizer="bpe")
    first.tokenizer.save(tmp_path / "run.json")
    shutil.rmtree(tmp_path / "cache" / "tokenizers")
    monkeypatch.setattr(prepare, "train_bpe", None)
    monkeypatch.setattr(
        readers, "text_file", None
    )  # the tokens are found in the cache by the tokenizer's content
    from moesys.config import DataConfig

    config = DataConfig(source=str(folder), held_out=0.3, cache=str(tmp_path / "cache"))
    again = prepare.open_data(
        config, vocab_size=300, sequence_length=8, seed=0, tokenizer=Tokenizer.load(tmp_path / "run.json")
    )
    assert torch.equal(first.train.batch(3, 9).tokens, again.train.batch(3, 9).tokens)


def test_large_vocabularies_take_four_bytes_a_token(folder, tmp_path, open_source):
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(saved_bytes(tmp_path).read_text())
    backend.add_tokens([f"word{k}" for k in range(66_000)])
    backend.save(str(tmp_path / "large.json"))
    (folder / "00.txt").write_text("word65999 word3")
    data = open_source(folder, tokenizer=str(tmp_path / "large.json"), vocab_size=70_000)
    assert data.train.dataset.tokens.dtype == np.uint32
    assert documents(data.train.dataset, data.tokenizer)[0] == "word65999 word3"


def test_nothing_is_printed_where_there_is_no_terminal(folder, open_source, capfd):
    open_source(folder, tokenizer="bpe")
    assert capfd.readouterr() == ("", "")


def test_long_files_stay_one_document(tmp_path, open_source, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_BYTES", 64)
    monkeypatch.setattr(prepare, "ENCODE_CHARS", 100)
    path = tmp_path / "text"
    path.mkdir()
    for k in range(12):
        (path / f"{k:02}.txt").write_text(f"größere Zeile {k}\n" * 40)
    data = open_source(path)
    found = documents(data.train.dataset, data.tokenizer) + documents(data.validation, data.tokenizer)
    assert sorted(found) == sorted(file.read_text() for file in path.iterdir())


def test_the_sample_for_the_bpe_is_bounded_even_and_independent_of_order(monkeypatch):
    monkeypatch.setattr(prepare, "SAMPLE_PIECE", 10)
    pieces = [Piece(f"{k}", f"{k:03}" * (1 + k % 9), True) for k in range(200)]
    chosen = sample(pieces, 300)
    assert 270 < sum(map(len, chosen)) <= 300
    assert sorted(chosen) == sorted(sample(pieces[::-1], 300))
    numbers = [int(text[:3]) for text in sample([Piece(f"{k}", f"{k:03}", True) for k in range(1000)], 300)]
    assert 380 < sum(numbers) / len(numbers) < 620  # 100 of 0..999: expected 500, std 29
    assert sorted("".join(sample(pieces, 10**6))) == sorted("".join(piece.text for piece in pieces))


def test_the_sample_ends_at_the_first_piece_that_does_not_fit(monkeypatch):
    # Ranks 1, 2, 3 with 5, 9 and 3 characters: 1 fits into 10, 2 does not, and 3 does not come in its place.
    monkeypatch.setattr(prepare, "_rank", lambda name, part: int(name))
    pieces = [Piece("1", "z" * 5, True), Piece("2", "y" * 9, True), Piece("3", "x" * 3, True)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]):
        assert sample([pieces[k] for k in order], 10) == ["z" * 5]


def test_open_text_takes_every_document(folder, tmp_path):
    tokenizer = Tokenizer.load(saved_bytes(tmp_path))
    dataset = open_text(str(folder), tokenizer, cache=str(tmp_path / "cache"))
    assert documents(dataset, tokenizer) == [file.read_text() for file in sorted(folder.iterdir())]


@pytest.mark.slow
def test_the_default_corpus(tmp_path):
    from moesys.config import DataConfig

    config = DataConfig(cache=str(tmp_path))
    data = prepare.open_data(config, vocab_size=4096, sequence_length=256, seed=0)
    assert data.tokenizer.vocab_size == 4096
    assert data.train.dataset.num_bytes > 8e6 and data.validation.num_documents > 10
    assert data.train.dataset.exact_bytes
    assert data.train.dataset.num_bytes > 2.5 * data.train.dataset.num_tokens
    assert 1.0 < data.xz_bits_per_byte() < 2.2
