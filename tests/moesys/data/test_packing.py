from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesys.data import TokenDataset, TrainingStream
from moesys.data.packing import pack, permuted


def test_hand_computed_windows(stream_of):
    # Stream: 0 1 2 3 | 0 4 | 0 5 6 7; windows of 4 with their next token start at 0 and 4.
    dataset = stream_of([[1, 2, 3], [4], [5, 6, 7]])
    batch = pack(dataset, np.array([0, 4]), 4, cross_document_attention=False)
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [0, 4, 0, 5]]
    assert batch.labels.tolist() == [[1, 2, 3, 0], [4, 0, 5, 6]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch.documents.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.documents)} == {torch.int64}


def test_a_window_that_starts_inside_a_document_counts_from_its_own_start(stream_of):
    dataset = stream_of([[1, 2, 3], [4], [5, 6, 7]])
    batch = pack(dataset, np.array([2]), 5, cross_document_attention=False)
    assert batch.tokens.tolist() == [[2, 3, 0, 4, 0]]
    assert batch.labels.tolist() == [[3, 0, 4, 0, 5]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 0]]
    assert batch.documents.tolist() == [[0, 0, 1, 1, 2]]


def test_cross_document_attention_makes_one_document_of_a_row(stream_of):
    dataset = stream_of([[1, 2, 3], [4], [5, 6, 7]])
    batch = pack(dataset, np.array([2]), 5, cross_document_attention=True)
    assert batch.labels.tolist() == [[3, 0, 4, 0, 5]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0]]


def test_padding_of_a_short_window(stream_of):
    dataset = stream_of([[1, 2], [3]])
    batch = pack(dataset, np.array([2]), 4, cross_document_attention=False)
    assert batch.tokens.tolist() == [[2, 0, 0, 0]]
    assert batch.labels.tolist() == [[0, 3, -100, -100]]
    assert batch.documents.tolist() == [[0, 1, -1, -1]]
    assert batch.num_labels == 2


def test_documents_without_end_of_text_are_not_predicted_across():
    # Megatron files may hold documents with nothing between them: 1 2 | 3 4 5.
    dataset = TokenDataset(
        name="memory",
        tokens=np.array([1, 2, 3, 4, 5]),
        offsets=np.array([0, 2, 5]),
        eot_id=0,
        token_bytes=np.ones(9, np.int32),
        exact_bytes=True,
    )
    batch = pack(dataset, np.array([0]), 4, cross_document_attention=False)
    assert batch.labels.tolist() == [[2, -100, 4, 5]]
    assert batch.positions.tolist() == [[0, 1, 0, 1]]
    assert batch.documents.tolist() == [[0, 0, 1, 1]]


def test_end_of_text_after_a_document_opens_the_next_one():
    # 1 2 0 | 3 4 0: as Megatron writes them; the end-of-text at the end of one is the start of the next.
    dataset = TokenDataset(
        name="memory",
        tokens=np.array([1, 2, 0, 3, 4, 0]),
        offsets=np.array([0, 3, 6]),
        eot_id=0,
        token_bytes=np.ones(9, np.int32),
        exact_bytes=True,
    )
    batch = pack(dataset, np.array([0, 3]), 5, cross_document_attention=False)
    assert batch.labels.tolist() == [[2, 0, 3, 4, 0], [4, 0, -100, -100, -100]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1], [0, 0, -1, -1, -1]]


def test_chosen_documents_are_read_as_one_stream():
    dataset = TokenDataset(
        name="memory",
        tokens=np.array([9, 9, 0, 1, 9, 0, 2, 3, 9]),
        offsets=np.array([0, 2, 5]),
        origins=np.array([2, 5]),
        eot_id=0,
        token_bytes=np.ones(10, np.int32),
        exact_bytes=True,
    )
    assert dataset.read(0, 5).tolist() == [0, 1, 0, 2, 3]
    assert dataset.read(1, 4).tolist() == [1, 0, 2]
    assert dataset.read(3, 3).tolist() == []
    batch = pack(dataset, np.array([0]), 4, cross_document_attention=False)
    assert batch.documents.tolist() == [[0, 0, 1, 1]]


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 100))
def test_order_is_a_bijection(size, seed, epoch):
    image = permuted(np.arange(size), size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_order_is_a_bijection_for_every_small_size():
    for size in range(1, 200):
        assert sorted(permuted(np.arange(size), size, seed=1, epoch=0).tolist()) == list(range(size))


def test_order_depends_on_seed_and_epoch_and_mixes():
    size = 10_000
    orders = [permuted(np.arange(size), size, seed=s, epoch=e) for s in (0, 1) for e in (0, 1)]
    orders += [np.arange(size)]
    for a in range(len(orders)):
        for b in range(a):
            # Two unrelated permutations agree in about 1 place and are hardly correlated (std 0.01).
            assert int((orders[a] == orders[b]).sum()) < 12
            assert abs(np.corrcoef(orders[a], orders[b])[0, 1]) < 0.06


def test_order_is_even_over_seeds_for_a_small_size():
    counts = np.zeros((10, 10))
    for seed in range(2000):
        image = permuted(np.arange(10), 10, seed=seed, epoch=0)
        counts[np.arange(10), image] += 1
    assert counts.min() > 130 and counts.max() < 270  # expected 200, std 13


def test_order_of_a_huge_epoch_needs_no_memory():
    size = 10**15
    image = permuted(np.array([0, 1, size - 1]), size, seed=0, epoch=0)
    assert len(set(image.tolist())) == 3 and image.min() >= 0 and image.max() < size


def test_order_refuses_an_index_out_of_range():
    with pytest.raises(ValueError, match=r"0\.\.4"):
        permuted(np.array([5]), 5, seed=0, epoch=0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    length=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_an_epoch_predicts_every_token_once(stream_of, lengths, length, seed):
    count = iter(range(1, 999))
    dataset = stream_of([[next(count) for _ in range(n)] for n in lengths])
    if dataset.num_tokens <= length:
        return
    stream = TrainingStream(dataset=dataset, sequence_length=length, seed=seed)
    batch = stream.batch(0, stream.samples_per_epoch)
    whole = (dataset.num_tokens - 1) // length * length
    assert sorted(batch.labels.flatten().tolist()) == sorted(dataset.tokens[1 : whole + 1].tolist())
    assert sorted(batch.tokens.flatten().tolist()) == sorted(dataset.tokens[:whole].tolist())


def test_batches_depend_on_nothing_but_seed_and_index(stream_of):
    dataset = stream_of([[k % 990 + 1 for k in range(n, 3 * n)] for n in range(1, 40)])
    stream = TrainingStream(dataset=dataset, sequence_length=16, seed=3)
    per_epoch = stream.samples_per_epoch
    first = per_epoch - 5  # across the end of the epoch
    whole = stream.batch(first, 12)
    fresh = TrainingStream(dataset=dataset, sequence_length=16, seed=3)
    parts = [fresh.batch(first + k, 1) for k in reversed(range(12))][::-1]
    for name in ("tokens", "labels", "positions", "documents"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(getattr(whole, name), joined)
    assert torch.equal(whole.rows(3, 7).labels, torch.cat([part.labels for part in parts[3:7]]))
    other = TrainingStream(dataset=dataset, sequence_length=16, seed=4).batch(first, 12)
    assert not torch.equal(whole.tokens, other.tokens)
    assert not torch.equal(stream.batch(0, per_epoch).tokens, stream.batch(per_epoch, per_epoch).tokens)


def test_a_text_shorter_than_one_sample_is_refused(stream_of):
    assert TrainingStream(dataset=stream_of([[1, 2, 3]]), sequence_length=3, seed=0).samples_per_epoch == 1
    with pytest.raises(ValueError, match=r"has 4 tokens, one sample of training\.sequence_length 4 takes 5"):
        TrainingStream(dataset=stream_of([[1, 2, 3]]), sequence_length=4, seed=0)
