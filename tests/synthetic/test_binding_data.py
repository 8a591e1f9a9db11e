"""Local bindings as training data."""

from __future__ import annotations

import itertools

import pytest
import torch

from pipeline.config import parse
from pipeline.registry import TRAINING_DATA
from pipeline.synthetic.binding import SMALLEST_SIDE
from pipeline.synthetic.binding_data import Binding, batch_of, evaluation_pairs
from tests.synthetic.test_binding import QUERY, SENTENCE


def data_of(batch_size: int = 8, seed: int = 0, **fields) -> Binding:
    spec = parse(Binding.Spec, {"side": SMALLEST_SIDE, **fields})
    return TRAINING_DATA.build(spec, batch_size=batch_size, seed=seed)


@pytest.mark.parametrize("form", ["text", "rendered"])
def test_a_batch_has_reports_and_their_hard_negatives(form):
    data = data_of(num_pairs=8, queries=3, form=form)
    assert data.num_batches == 2
    batch = next(data.batches(0, 0, 0, 1))
    assert len(batch.documents) == len(set(batch.document_keys)) == 8
    assert len(batch.queries) == 4 * 3
    positive = data.relevant(batch.query_facts, batch.document_facts)
    assert positive.sum(dim=1).tolist() == [1] * 12
    assert positive.sum(dim=0).tolist() == [3, 0] * 4
    for document in batch.documents:
        assert list(document) == (["text"] if form == "text" else ["image"])
    if form == "text":
        for query, relevant in zip(batch.queries, positive, strict=True):
            asked = QUERY.fullmatch(query).groups()
            holds = [asked in SENTENCE.findall(each["text"]) for each in batch.documents]
            assert holds == relevant.tolist()


def test_nothing_that_is_measured_on_is_trained_on():
    validation = data_of(validation=40).validation()
    assert len(validation.queries) == 1000 and len(validation.documents) == 80
    texts = {document["text"] for document in validation.documents}
    for seed in (0, 1):
        data = data_of(batch_size=16, seed=seed, num_pairs=48)
        for batch in itertools.chain(data.batches(0, 0, 0, 1), data.batches(1, 0, 0, 1)):
            assert not texts & {document["text"] for document in batch.documents}
            assert not set(validation.document_keys) & set(batch.document_keys)


@pytest.mark.parametrize("fresh", [True, False])
def test_workers_share_the_batches_of_one(fresh):
    data = data_of(num_pairs=16, fresh=fresh)
    alone = list(data.batches(1, 1, 0, 1))
    shared = [list(data.batches(1, 1, worker, 2)) for worker in range(2)]
    assert len(alone) == 3
    for batch, *parts in zip(alone, *shared, strict=True):
        for name in ("queries", "documents", "document_keys"):
            assert getattr(batch, name) == [one for part in parts for one in getattr(part, name)]
        facts = torch.cat([part.document_facts for part in parts])
        assert torch.equal(batch.document_facts, facts)


@pytest.mark.parametrize("fresh", [True, False])
def test_epochs(fresh):
    data = data_of(num_pairs=16, fresh=fresh)
    first, second = (
        {query for batch in data.batches(epoch, 0, 0, 1) for query in batch.queries}
        for epoch in (0, 1)
    )
    assert data.repeats != fresh
    assert first.isdisjoint(second) if fresh else first == second


@pytest.mark.parametrize("count", [{"name": "binding", "num_pairs": 9}, {"num_scenes": 18}])
def test_what_fills_no_batch_is_left_out_of_all_epochs(count):
    """Or the cache of hidden states, filled in the first epoch, would lack those of others."""
    given = {"name": "shapes", "fresh": False} | count
    data = TRAINING_DATA.build(TRAINING_DATA.resolve(given), batch_size=4, seed=0)
    first, second, every = (
        {key for batch in batches for key in batch.document_keys}
        for batches in (data.batches(0, 0, 0, 1), data.batches(1, 0, 0, 1), data.everything(0, 1))
    )
    assert len(first) == 16 and first == second == every


def test_quality_compares_within_pairs_alone():
    data = data_of()
    pairs = evaluation_pairs(4)
    validation = batch_of(pairs, [range(5)] * 4, "text")
    scores = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    right = [scores[q, 2 * (q // 5)] > scores[q, 2 * (q // 5) + 1] for q in range(20)]
    found = data.quality(scores, validation)
    assert list(found) == ["pairwise_accuracy"]
    assert found["pairwise_accuracy"].tolist() == list(map(int, right))
    # The order of documents is nothing that it depends on.
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    facts = validation.document_facts[order]
    moved = type(validation)(
        validation.queries,
        validation.documents,
        validation.document_keys,
        validation.query_facts,
        facts,
    )
    assert (data.quality(scores[:, order], moved)["pairwise_accuracy"] == right).all()
