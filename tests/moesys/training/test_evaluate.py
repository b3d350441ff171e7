from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from moesys.data import TokenDataset, evaluation_batches
from moesys.testing import naive_model
from moesys.testing.tiny import (
    arguments,
    cut,
    random_batch,
    random_model,
    random_trainer,
    snapshot,
    tiny,
    tiny_run,
    weights_of,
)
from moesys.training.evaluate import evaluate

SIZE = {"sequence_length": 6, "batch_size": 2}


def dataset(exact_bytes: bool = True) -> TokenDataset:
    """35 tokens in 3 documents; token t stands for t bytes, 0 is end-of-text."""
    tokens = np.random.default_rng(0).integers(1, 13, 35)
    offsets = np.array([0, 11, 15, 35])
    tokens[offsets[:-1]] = 0
    lengths = [int(tokens[a:b].sum()) for a, b in pairwise(offsets)]
    return TokenDataset(
        name="memory",
        tokens=tokens,
        offsets=offsets,
        eot_id=0,
        token_bytes=np.arange(13, dtype=np.int32),
        document_bytes=np.array(lengths),
        exact_bytes=exact_bytes,
    )


@pytest.mark.parametrize("changes", [{}, {"attention": "gqa"}, {"mtp_depth": 1}])
def test_against_the_naive_model(changes):
    model = random_model(tiny(**changes))
    data = dataset()
    found = evaluate(model, data, **SIZE)
    nats, tokens = 0.0, 0
    for batch in evaluation_batches(data, 6, 2):
        sums = naive_model.run(model.config, weights_of(model), *arguments(batch))
        nats, tokens = nats + sums.ce.item(), tokens + sums.labels
    assert found.tokens == tokens == 34
    assert found.loss == pytest.approx(nats / 34, rel=1e-12)
    text = int(data.tokens[1:].sum())
    assert found.num_bytes == text
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / text, rel=1e-12)
    assert found.exact_bytes


def test_batch_size_and_chunk_do_not_matter():
    model = random_model(tiny())
    want = evaluate(model, dataset(), **SIZE)
    for batch_size, chunk in ((1, 1024), (5, 3), (100, 1)):
        got = evaluate(model, dataset(), sequence_length=6, batch_size=batch_size, chunk=chunk)
        assert (got.tokens, got.num_bytes) == (want.tokens, want.num_bytes)
        assert got.loss == pytest.approx(want.loss, rel=1e-12)


def test_some_of_the_text():
    told = []
    found = evaluate(random_model(tiny()), dataset(), **SIZE, max_tokens=12, on_batch=told.append)
    assert found.tokens == sum(told) <= 12


def test_bytes_that_are_not_exact_are_said_to_be_so():
    assert not evaluate(random_model(tiny()), dataset(exact_bytes=False), **SIZE).exact_bytes


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("recompute", ["", "block"])
def test_between_steps_it_changes_nothing(precision, recompute):
    # B3: train, evaluate, train = train, train
    config = tiny_run(tiny(mtp_depth=1), precision=precision, recompute=recompute)
    quiet, watched = random_trainer(config), random_trainer(config)
    for step in range(3):
        batch = cut(random_batch(13, [[3, 2], [6], [4], [1, 5]], 6, seed=step), 2)
        one = quiet.train_step(batch)
        evaluate(watched.model, dataset(), **SIZE)
        two = watched.train_step(batch)
        evaluate(watched.model, dataset(), **SIZE, max_tokens=12)
        assert (one.loss, one.grad_norm) == (two.loss, two.grad_norm)
    left, right = snapshot(quiet), snapshot(watched)
    assert all(torch.equal(value, right[name]) for name, value in left.items())


def test_it_repeats_and_keeps_no_graph():
    model = random_model(tiny())
    first, second = (evaluate(model, dataset(), **SIZE) for _ in range(2))
    assert first == second
    assert all(parameter.grad is None for parameter in model.parameters())


def test_penalties_are_not_in_it():
    found = []
    for coef in (0.0, 5.0):
        trainer = random_trainer(tiny_run(balance={"loss_coef": coef, "z_loss_coef": coef}))
        found.append(evaluate(trainer.model, dataset(), **SIZE))
    assert found[0] == found[1]
