"""Search of the first vectors of a representation, against a column that stores only these."""

import numpy as np
import pytest
import torch

from pipeline.search import score
from pipeline.search.searcher import open_index

QUERIES = ["the lift of a wing", "how to bake bread", "heat at the nose of a body"]


@pytest.fixture(scope="module")
def searcher(nested_uri):
    return open_index(nested_uri)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("codec", ["", "_int8"])
@pytest.mark.parametrize("kind", ["maxsim", "single_vector", "hybrid"])
def test_scores_equal_a_smaller_column(nested_uri, kind, codec, cache):
    searcher = open_index(nested_uri, cache=cache)
    options = {"k": 100, "score": kind, "filter": "parent_id <> 'flow'"}
    prefix, smaller = (
        searcher.rank(QUERIES, name, **options)
        for name in (f"nested_8{codec}@3", f"nested_3{codec}")
    )
    for ranking, expected in zip(prefix, smaller, strict=True):
        assert ranking.item_ids == expected.item_ids
        assert ranking.scores == expected.scores  # bit-identical


def test_hits_equal_a_smaller_column(searcher):
    """The tokens of later vectors are assigned to the nearest of the first vectors."""
    whole = searcher.search(QUERIES, "nested_8@8", k=5)
    renamed = [[hit.model_copy(update={"representation": "nested_8"}) for hit in h] for h in whole]
    assert renamed == searcher.search(QUERIES, "nested_8", k=5)
    for hits, expected in zip(
        searcher.search(QUERIES, "nested_8@3", k=5),
        searcher.search(QUERIES, "nested_3", k=5),
        strict=True,
    ):
        for hit, other in zip(hits, expected, strict=True):
            assert (hit.item_id, hit.score, hit.parts) == (other.item_id, other.score, other.parts)
            for match, equal in zip(hit.matches, other.matches, strict=True):
                assert match.document_token == equal.document_token < 3
                assert (match.similarity, match.contribution) == (
                    equal.similarity,
                    equal.contribution,
                )
        assert hits[0].passages


def test_all_tokens_are_assigned_to_the_prefix(searcher):
    (hit,) = searcher.search(QUERIES[0], "nested_8@1", k=1, parents=["wing"], group_by="parent")
    starts = [start for match in hit.matches for start, _ in match.spans]
    ends = [end for match in hit.matches for _, end in match.spans]
    assert min(starts) == 0 and max(ends) >= len(hit.text.rstrip(".")) - 1


def test_vectors_are_views(searcher):
    whole, prefix = searcher.packed("nested_8"), searcher.packed("nested_8@3")
    assert searcher.packed("nested_8@3") is prefix
    for segment, view in zip(whole.segments, prefix.segments, strict=True):
        assert view.parts["values"].data_ptr() == segment.parts["values"].data_ptr()
    assert prefix.lengths.tolist() == searcher.packed("nested_3").lengths.tolist()
    for row in range(len(prefix)):
        assert torch.equal(prefix.item(row), whole.item(row)[:3])


def test_number_of_cached_views(nested_uri, monkeypatch):
    monkeypatch.setattr(score, "MAX_PREFIXES", 2)
    searcher = open_index(nested_uri)
    views = [searcher.packed(f"nested_8@{k}") for k in (1, 2, 3)]
    assert searcher.packed("nested_8@3") is views[2]
    assert searcher.packed("nested_8@1") is not views[0]


def test_vectors_of_items(searcher):
    vectors = searcher.scorer.item_vectors("nested_8@2", np.array([0, 3]))
    whole = searcher.scorer.item_vectors("nested_8", np.array([0, 3]))
    assert [v.tolist() for v in vectors] == [v[:2].tolist() for v in whole]
