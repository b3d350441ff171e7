from __future__ import annotations

import numpy as np
import pytest

from moesys.data import evaluation_batches, megatron, open_data, open_text
from moesys.data.tokenizer import bytes_tokenizer

DOCUMENTS = [[[7, 8, 9]], [[1, 2], [3]], [[]], [[4, 5, 6, 6]]]


@pytest.mark.parametrize(
    ("code", "letter", "size"), [(1, "B", 1), (2, "b", 1), (3, "h", 2), (4, "i", 4), (5, "q", 8), (8, "H", 2)]
)
def test_tokens_and_documents(tmp_path, write_megatron, code, letter, size):
    prefix = write_megatron(tmp_path / "data_text", DOCUMENTS, code=code, letter=letter, size=size)
    file = megatron.open_indexed(prefix)
    assert file.tokens.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6, 6]
    assert file.offsets.tolist() == [0, 3, 6, 10]
    assert isinstance(file.tokens, np.memmap)


def test_every_way_to_name_a_pair(tmp_path, write_megatron):
    prefix = write_megatron(tmp_path / "a.b", DOCUMENTS)
    for path in (prefix, tmp_path / "a.b.bin", tmp_path / "a.b.idx", tmp_path):
        dataset = open_text(str(path), bytes_tokenizer())
        assert dataset.read(0, dataset.num_tokens).tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6, 6]
    write_megatron(tmp_path / "second", DOCUMENTS)
    with pytest.raises(ValueError, match=r"not one Megatron \.bin/\.idx pair; give the path of its \.idx"):
        open_text(str(tmp_path), bytes_tokenizer())
    (tmp_path / "lonely.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="not one Megatron"):
        open_text(str(tmp_path / "lonely.bin"), bytes_tokenizer())


def test_training_and_held_out_documents_are_shared_out(tmp_path, write_megatron, open_source):
    # Documents of different lengths, ended by end-of-text (256) as Megatron appends it.
    documents = [[[(17 * k + j) % 256 for j in range(1 + k % 7)] + [256]] for k in range(60)]
    prefix = write_megatron(tmp_path / "data", documents)
    for _ in range(2):  # the second time from the cache
        data = open_source(prefix, sequence_length=4)
        parts = data.train.dataset, data.validation
        streams = [part.read(0, part.num_tokens).tolist() for part in parts]
        back = [cut(stream) for stream in streams]
        assert sorted(back[0] + back[1]) == sorted(document[0][:-1] for document in documents)
        assert min(len(back[0]), len(back[1])) > 5
        assert data.validation.num_documents == len(back[1])
    assert "documents" in data.description and "MB" not in data.description
    batch = data.train.batch(0, data.train.samples_per_epoch)
    # Position 0 is where a row starts or an end-of-text stands, and nowhere else.
    expected = batch.tokens == 256
    expected[:, 0] = True
    assert ((batch.positions == 0) == expected).all()
    counted = sum(b.num_bytes for b in evaluation_batches(data.validation, 4, 3))
    stream = streams[1]
    assert counted == sum(token != 256 for token in stream[1:])


def cut(stream: list[int]) -> list[list[int]]:
    documents, current = [], []
    for token in stream:
        if token == 256:
            documents.append(current)
            current = []
        else:
            current.append(token)
    assert not current
    return documents


def test_no_tokens_are_copied(tmp_path, write_megatron):
    prefix = write_megatron(tmp_path / "data", DOCUMENTS)
    dataset = open_text(str(prefix), bytes_tokenizer(), cache=str(tmp_path / "cache"))
    assert isinstance(dataset.tokens, np.memmap)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "idx",
            lambda b: b"GARBAGE!!" + b[9:],
            r"data\.idx does not start with the mark of a Megatron index",
        ),
        ("idx", lambda b: b[:20], r"data\.idx does not start with the mark"),
        ("idx", lambda b: b[:9] + b"\x02" + b[10:], r"version 2; only version 1"),
        ("idx", lambda b: b[:17] + b"\x07" + b[18:], r"dtype code 7; tokens are integers"),
        (
            "idx",
            lambda b: b[:-8],
            r"data\.idx has \d+ bytes, 5 sequences and 4 documents take \d+: it is trunc",
        ),
        ("idx", lambda b: b[:-8] + b"\x09" + b[-7:], r"document index does not run from 0 to 5"),
        ("idx", lambda b: b[:34] + b"\x02" + b[35:], r"sequences do not follow one another in data\.bin"),
        ("bin", lambda b: b[:-2], r"data\.bin has 18 bytes, its index data\.idx needs 20: it is truncated"),
        ("bin", lambda b: b + b"xx", r"data\.bin has 22 bytes, its index data\.idx needs 20"),
    ],
)
def test_damage_is_named(tmp_path, write_megatron, file, change, message):
    prefix = write_megatron(tmp_path / "data", DOCUMENTS)
    path = prefix.with_name(f"data.{file}")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        megatron.open_indexed(prefix)


def test_empty_files_are_named(tmp_path, write_megatron):
    with pytest.raises(ValueError, match=r"data\.idx is empty: no documents"):
        megatron.open_indexed(write_megatron(tmp_path / "data", []))
    with pytest.raises(ValueError, match=r"data\.bin is empty: no tokens"):
        megatron.open_indexed(write_megatron(tmp_path / "data", [[[]]]))


def test_tokens_outside_the_vocabulary_are_named(tmp_path, write_megatron):
    for letter, code, bad in (("H", 8, 300), ("h", 3, -2)):
        prefix = write_megatron(tmp_path / "data", [[[1, bad, 3]]], letter=letter, code=code)
        dataset = open_text(str(prefix), bytes_tokenizer())
        with pytest.raises(ValueError, match=f"data holds token {bad}, the tokenizer's ids are 0 to 256"):
            dataset.read(0, 3)


def test_a_tokenizer_must_be_named(tmp_path, write_megatron, open_source):
    prefix = write_megatron(tmp_path / "data", DOCUMENTS)
    with pytest.raises(ValueError, match=r"holds token ids, .*give the tokenizer\.json that made them"):
        open_source(prefix, tokenizer="bpe")


def test_the_end_of_an_only_document_is_held_out(tmp_path, write_megatron, open_source):
    prefix = write_megatron(tmp_path / "data", [[[*range(1, 30), 256]]])
    data = open_source(prefix, held_out=0.3)
    train, held_out = data.train.dataset, data.validation
    assert train.read(0, train.num_tokens).tolist() == [*range(1, 22)]
    assert held_out.read(0, held_out.num_tokens).tolist() == [*range(22, 30), 256]
    assert data.train.batch(0, 1).labels.min() > 0
    assert sum(batch.num_labels for batch in evaluation_batches(held_out, 4, 2)) == 8
    assert data.description.endswith("9 tokens held out: the last 30% of its only document")


def test_too_little_is_held_out(tmp_path, write_megatron, open_source):
    prefix = write_megatron(tmp_path / "data", [[[*range(1, 30)]]])
    with pytest.raises(ValueError, match=r"has 1 token\(s\), and evaluation needs 2: raise --data\.held-out"):
        open_source(prefix, held_out=0.03)


def test_validation_of_its_own(tmp_path, write_megatron):
    from moesys.config import DataConfig

    train = write_megatron(tmp_path / "train", [[[1, 2, 3, 256]]])
    held_out = write_megatron(tmp_path / "valid", [[[5, 6, 256]]])
    config = DataConfig(
        source=str(train), validation=str(held_out), tokenizer="bytes", cache=str(tmp_path / "c")
    )
    data = open_data(config, vocab_size=257, sequence_length=2, seed=0)
    assert data.train.dataset.read(0, 4).tolist() == [1, 2, 3, 256]
    assert data.validation.read(0, 3).tolist() == [5, 6, 256]
