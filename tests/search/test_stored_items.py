"""Tests of stored vectors as queries, against literal float64 implementations."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.index.reader import IndexReader
from pipeline.search.searcher import open_index
from pipeline.search.stored_items import stored_query
from tests.conftest import write_index


@pytest.fixture(scope="module")
def index(index_uri) -> IndexReader:
    return IndexReader(index_uri)


def vectors_of(index: IndexReader, representation: str) -> dict[str, np.ndarray]:
    """Returns the stored vectors of each item in float64."""
    found = {}
    for items, vectors, lengths in index.tokens(representation):
        ends = np.cumsum(lengths)
        for item_id, start, end in zip(
            items["item_id"].to_pylist(), ends - lengths, ends, strict=True
        ):
            found[item_id] = vectors[start:end].astype(np.float64)
    return found


def maxsim(query: np.ndarray, item: np.ndarray) -> float:
    return sum(max(float(q @ d) for d in item) for q in query)


@pytest.mark.parametrize("representation", ["full", "hpool_4", "random_4"])
def test_scores_equal_maxsim_of_stored_vectors(index, index_uri, representation):
    stored = vectors_of(index, representation)
    query = stored_query(index, "wing/1", representation)
    searcher = open_index(index_uri)
    (ranking,) = searcher.rank(query, representation, k=8)
    expected = {i: maxsim(stored["wing/1"], vectors) for i, vectors in stored.items()}
    assert ranking.item_ids == sorted(expected, key=lambda i: (-expected[i], i))
    assert ranking.scores == pytest.approx([expected[i] for i in ranking.item_ids], rel=2e-3)
    assert ranking.item_ids[:2] == ["wing/1", "wing/2"]


def test_vectors_of_other_lengths_keep_them(tmp_path):
    uri = str(tmp_path / "index")
    write_index(uri, [{"compressor": {"name": "cluster", "num_vectors": 2}}])
    index, name = IndexReader(uri), "cluster_2"
    stored = vectors_of(index, name)
    assert max(np.linalg.norm(stored["flow"], axis=1)) < 0.95
    (ranking,) = open_index(uri).rank(stored_query(index, "flow", name), name, k=8)
    expected = {item_id: maxsim(stored["flow"], vectors) for item_id, vectors in stored.items()}
    assert ranking.scores_by_item() == pytest.approx(expected, rel=1e-5)


def test_query_has_texts_and_single_vector(index):
    query = stored_query(index, "wing/1", "full")
    assert {"The", "lift", "wing"} <= set(query.token_texts[0])
    assert query.pooled is not None and query.pooled.shape == (1, 384)
    assert query.texts is None


def test_rejects_unknown_items_and_items_without_vectors(index):
    with pytest.raises(SpecError, match=r"query\.item must be the id of an item in the index"):
        stored_query(index, "nobody", "full")
    last = index.dataset.to_table(columns=["item_id"])["item_id"].to_pylist()[-1]
    with pytest.raises(SpecError, match=r"query\.item must be an item with vectors in hpool_2"):
        stored_query(index, last, "hpool_2")


def test_rejects_parts_without_tokens(index):
    with pytest.raises(SpecError, match=r"query\.box must be a part of the item that contains"):
        stored_query(index, "wing/1", "full", box=(0, 0, 1, 1))  # texts have no boxes
    with pytest.raises(SpecError, match=r"query\.times must be a part of the item that contains"):
        stored_query(index, "wing/1", "full", times=(0, 1))


def test_parts_require_positions(tmp_path):
    uri = str(tmp_path / "index")
    write_index(uri, [{"compressor": {"name": "none"}}], keep_positions=False)
    index = IndexReader(uri)
    assert len(stored_query(index, "flow", "full").tokens[0]) > 3
    with pytest.raises(SpecError, match="token positions"):
        stored_query(index, "flow", "full", box=(0, 0, 1, 1))
