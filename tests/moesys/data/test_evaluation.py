from __future__ import annotations

import lzma
import math

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesys.data import IGNORED, TokenDataset, bits_per_byte, evaluation_batches, train_bpe, xz_bits_per_byte
from moesys.data.evaluation import dataset_xz_bits_per_byte

SHARED = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SHARED
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=10),
    sequence_length=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    cross=st.booleans(),
)
def test_every_token_after_the_first_is_predicted_once_in_order(
    stream_of, lengths, sequence_length, batch_size, cross
):
    count = iter(range(1, 999))
    dataset = stream_of([[next(count) for _ in range(n)] for n in lengths])
    if dataset.num_tokens < 2:
        return
    batches = list(evaluation_batches(dataset, sequence_length, batch_size, cross_document_attention=cross))
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    tokens = torch.cat([batch.tokens.flatten() for batch in batches])
    documents = torch.cat([batch.documents.flatten() for batch in batches])
    real = labels != IGNORED
    assert labels[real].tolist() == dataset.tokens[1:].tolist()
    assert tokens[real].tolist() == dataset.tokens[:-1].tolist()
    assert torch.equal(documents == -1, ~real)
    assert all(len(batch.tokens) == batch_size for batch in batches[:-1])
    assert sum(batch.num_bytes for batch in batches) == sum(lengths)


def test_windows_do_not_overlap_and_the_last_is_padded(stream_of):
    batches = list(evaluation_batches(stream_of([[1, 2, 3, 4, 5, 6]]), 4, 1))
    assert [batch.tokens.tolist() for batch in batches] == [[[0, 1, 2, 3]], [[4, 5, 0, 0]]]
    assert [batch.labels.tolist() for batch in batches] == [[[1, 2, 3, 4]], [[5, 6, -100, -100]]]
    assert [batch.num_bytes for batch in batches] == [4, 2]


def test_a_truncated_evaluation_is_spread_over_the_stream(stream_of):
    dataset = stream_of([list(range(1, 800))])  # 100 windows of 8, less a token
    [batch] = evaluation_batches(dataset, 8, 16, max_tokens=39)
    # Four whole windows fit 39 tokens, one from the middle of each quarter of the stream.
    assert batch.tokens[:, 0].tolist() == [12 * 8, 37 * 8, 62 * 8, 87 * 8]
    again = next(iter(evaluation_batches(dataset, 8, 16, max_tokens=39)))
    assert torch.equal(batch.tokens, again.tokens)
    everything = list(evaluation_batches(dataset, 8, 7, max_tokens=10**9))
    assert sum(b.num_labels for b in everything) == 799
    assert sum(b.num_labels for b in evaluation_batches(dataset, 8, 16, max_tokens=1)) == 8


@SHARED
@given(max_tokens=st.integers(1, 400), sequence_length=st.integers(1, 40))
def test_windows_of_a_truncated_evaluation_are_distinct(stream_of, max_tokens, sequence_length):
    dataset = stream_of([list(range(1, 300))])
    batches = list(evaluation_batches(dataset, sequence_length, 3, max_tokens=max_tokens))
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    labels = labels[labels != IGNORED].tolist()
    assert len(set(labels)) == len(labels) <= max(max_tokens, sequence_length)
    assert labels == sorted(labels)


def test_bytes_of_a_truncated_evaluation_are_those_of_its_labels(tmp_path, open_source):
    folder = tmp_path / "text"
    folder.mkdir()
    for k in range(30):
        (folder / f"{k}.txt").write_text(f"line {k} of some plain text, again and again\n" * (k + 1))
    train_bpe([f.read_text() for f in folder.iterdir()], 300).save(tmp_path / "t.json")
    data = open_source(folder, tokenizer=str(tmp_path / "t.json"), sequence_length=16)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    batches = list(evaluation_batches(data.validation, 16, 4, max_tokens=160))
    assert len(batches) == 3
    for batch in batches:
        assert batch.exact_bytes
        for row, count in zip(batch.labels.tolist(), batch.row_bytes.tolist(), strict=True):
            text = library.decode([token for token in row if token >= 0], skip_special_tokens=True)
            assert count == len(text.encode())


def test_bytes_are_shared_out_where_the_tokenizer_does_not_tell(stream_of):
    exact = stream_of([[1, 2, 3, 4], [5, 6]])
    dataset = TokenDataset(
        name="memory",
        tokens=exact.tokens,  # 0 1 2 3 4 0 5 6
        offsets=exact.offsets,
        eot_id=0,
        token_bytes=exact.token_bytes,
        document_bytes=np.array([10, 3]),
        exact_bytes=False,
    )
    batches = list(evaluation_batches(dataset, 3, 1))
    assert [batch.labels[0].tolist() for batch in batches] == [[1, 2, 3], [4, 0, 5], [6, -100, -100]]
    assert [batch.num_bytes for batch in batches] == pytest.approx([7.5, 2.5 + 1.5, 1.5])
    assert not batches[0].exact_bytes


def test_slices_of_a_batch_keep_their_own_bytes(stream_of):
    [batch] = evaluation_batches(stream_of([[1, 2, 3, 4, 5], [6]]), 3, 8)
    assert batch.num_bytes == 6
    assert [batch.rows(k, k + 1).num_bytes for k in range(3)] == [3, 2, 1]
    assert batch.to("cpu").num_bytes == 6


def test_evaluation_refuses_what_makes_no_sense(stream_of):
    with pytest.raises(ValueError, match="memory has 1 token, evaluation needs at least 2"):
        list(evaluation_batches(stream_of([[]]), 4, 1))
    with pytest.raises(ValueError, match="must be at least 1, got 1, 4 and 0"):
        list(evaluation_batches(stream_of([[1, 2]]), 4, 1, max_tokens=0))


def test_bits_per_byte():
    # A uniform guess among 256 bytes costs 8 bits each.
    assert bits_per_byte(5 * math.log(256), 5) == pytest.approx(8)
    with pytest.raises(ValueError, match="got 0 bytes"):
        bits_per_byte(1.0, 0)


def test_xz_yardstick_is_that_of_the_concatenated_text():
    documents = [b"some text that repeats " * 50, b"", bytes(range(256)) * 3, b"some text that repeats " * 9]
    whole = b"".join(documents)
    assert xz_bits_per_byte(documents) == pytest.approx(8 * len(lzma.compress(whole, preset=9)) / len(whole))


def test_xz_yardstick_of_a_run_is_kept(tmp_path, open_source, monkeypatch):
    folder = tmp_path / "text"
    folder.mkdir()
    for k in range(12):
        (folder / f"{k}.txt").write_text(f"größer {k}\n" * 40)
    data = open_source(folder)
    value = data.xz_bits_per_byte()
    stream = data.validation.read(0, data.validation.num_tokens)
    text = bytes(stream[stream != 256].astype(np.uint8))
    assert value == pytest.approx(8 * len(lzma.compress(text, preset=9)) / len(text))
    kept = data.validation.folder / "xz.json"
    kept.write_text("{")  # damaged: computed again
    assert data.xz_bits_per_byte() == value
    monkeypatch.setattr(lzma, "LZMACompressor", None)
    assert data.xz_bits_per_byte() == value


def test_xz_yardstick_reads_no_more_than_its_limit(stream_of, monkeypatch):
    from moesys.data import evaluation
    from moesys.data.tokenizer import bytes_tokenizer

    monkeypatch.setattr(evaluation, "XZ_LIMIT", 160)
    text = bytes((k * k) % 251 + 1 for k in range(400))
    dataset = stream_of([list(text)])
    expected = 8 * len(lzma.compress(b"\x00" + text[:159], preset=9)) / 160
    assert dataset_xz_bits_per_byte(dataset, bytes_tokenizer()) == pytest.approx(expected)
