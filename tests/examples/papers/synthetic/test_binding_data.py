"""Tests of the training data of local bindings."""

from __future__ import annotations

import itertools

import pytest
import torch

from examples.papers.synthetic import BINDING, SHAPES
from examples.papers.synthetic.binding import MIN_SIDE
from examples.papers.synthetic.binding_data import Binding, evaluation_pairs, make_batch
from pipeline.config import parse
from pipeline.registry import TRAINING_DATA
from tests.examples.papers.synthetic.test_binding import QUERY, SENTENCE


def build_data(batch_size: int = 8, seed: int = 0, **fields) -> Binding:
    spec = parse(Binding.Spec, {"side": MIN_SIDE, **fields})
    return TRAINING_DATA.build(spec, batch_size=batch_size, seed=seed)


@pytest.mark.parametrize("form", ["text", "rendered"])
def test_batch_has_reports_and_hard_negatives(form):
    data = build_data(num_pairs=8, queries=3, form=form)
    assert data.num_batches == 2
    batch = next(data.batches(0, 0, 0, 1))
    assert len(batch.documents) == len(set(batch.document_keys)) == 8
    assert len(batch.queries) == 4 * 3
    positive = data.relevant(batch.query_labels, batch.document_labels)
    assert positive.sum(dim=1).tolist() == [1] * 12
    assert positive.sum(dim=0).tolist() == [3, 0] * 4
    for document in batch.documents:
        assert list(document) == (["text"] if form == "text" else ["image"])
    if form == "text":
        for query, relevant in zip(batch.queries, positive, strict=True):
            binding = QUERY.fullmatch(query).groups()
            matches = [binding in SENTENCE.findall(item["text"]) for item in batch.documents]
            assert matches == relevant.tolist()


def test_validation_data_are_not_in_training_data():
    validation = build_data(validation=40).validation()
    assert len(validation.queries) == 1000 and len(validation.documents) == 80
    texts = {document["text"] for document in validation.documents}
    for seed in (0, 1):
        data = build_data(batch_size=16, seed=seed, num_pairs=48)
        for batch in itertools.chain(data.batches(0, 0, 0, 1), data.batches(1, 0, 0, 1)):
            assert not texts & {document["text"] for document in batch.documents}
            assert not set(validation.document_keys) & set(batch.document_keys)


@pytest.mark.parametrize("fresh", [True, False])
def test_workers_split_batches(fresh):
    data = build_data(num_pairs=16, fresh=fresh)
    batches = list(data.batches(1, 1, 0, 1))
    shared = [list(data.batches(1, 1, worker, 2)) for worker in range(2)]
    assert len(batches) == 3
    for batch, *parts in zip(batches, *shared, strict=True):
        for name in ("queries", "documents", "document_keys"):
            assert getattr(batch, name) == [v for part in parts for v in getattr(part, name)]
        facts = torch.cat([part.document_labels for part in parts])
        assert torch.equal(batch.document_labels, facts)


@pytest.mark.parametrize("fresh", [True, False])
def test_epochs(fresh):
    data = build_data(num_pairs=16, fresh=fresh)
    first, second = (
        {query for batch in data.batches(epoch, 0, 0, 1) for query in batch.queries}
        for epoch in (0, 1)
    )
    assert data.repeats != fresh
    assert first.isdisjoint(second) if fresh else first == second


@pytest.mark.parametrize(
    "count",
    [
        {"class": BINDING, "num_pairs": 9},
        {"num_scenes": 18},
    ],
)
def test_incomplete_batches_are_dropped_in_all_epochs(count):
    """The cache of hidden states is filled in the first epoch and must cover all others."""
    fields = {"class": SHAPES, "fresh": False} | count
    data = TRAINING_DATA.build(TRAINING_DATA.resolve(fields), batch_size=4, seed=0)
    first, second, full = (
        {key for batch in batches for key in batch.document_keys}
        for batches in (data.batches(0, 0, 0, 1), data.batches(1, 0, 0, 1), data.full_pass(0, 1))
    )
    assert len(first) == 16 and first == second == full


def test_quality_compares_within_pairs():
    data = build_data()
    pairs = evaluation_pairs(4)
    validation = make_batch(pairs, [range(5)] * 4, "text")
    scores = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    correct = [scores[q, 2 * (q // 5)] > scores[q, 2 * (q // 5) + 1] for q in range(20)]
    found = data.quality(scores, validation)
    assert list(found) == ["pairwise_accuracy"]
    assert found["pairwise_accuracy"].tolist() == list(map(int, correct))
    # The order of documents does not matter.
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    facts = validation.document_labels[order]
    shuffled = type(validation)(
        validation.queries,
        validation.documents,
        validation.document_keys,
        validation.query_labels,
        facts,
    )
    assert (data.quality(scores[:, order], shuffled)["pairwise_accuracy"] == correct).all()
