"""Tests of facets, sizes and examples of an index."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.index.reader import IndexReader
from pipeline.search.facets import index_facets
from pipeline.search.searcher import open_index


def test_facets_and_sizes(index_uri):
    index = IndexReader(index_uri)
    found = index_facets(index)
    rows = index.dataset.to_table(columns=["modality", "source"]).to_pylist()
    for facet in found.facets:
        counts = Counter(row[facet.column] for row in rows)
        assert dict(facet.values) == counts and facet.num_values == len(counts)
    assert [facet.column for facet in found.facets] == ["modality", "source"]

    sizes = {size.name: size for size in found.sizes}
    assert set(sizes) == set(index.representations())
    for name, size in sizes.items():
        lengths = [n for _, _, lengths in index.tokens(name) for n in lengths.tolist()]
        mean = sum(lengths) / len(lengths)
        assert size.vectors_per_item == pytest.approx(mean)
        assert size.bytes_per_item == pytest.approx(mean * 384 * 2)  # float16


def test_samples_are_items_of_all_sources(index_uri):
    index = IndexReader(index_uri)
    samples = index_facets(index).samples
    ids = [sample.item_id for sample in samples]
    assert len({*ids}) == len(ids) == min(24, len(index))
    rows = index.items(ids, ["title", "source"]).to_pylist()
    assert {row["source"] for row in rows} == {
        value for facet in index_facets(index).facets[1:] for value, _ in facet.values
    }
    titles = {
        row["item_id"]: row["title"] for row in index.items(ids, ["item_id", "title"]).to_pylist()
    }
    assert all((titles[s.item_id] or s.title).startswith(s.title) for s in samples)


def test_examples_are_short_texts_of_items(index_uri):
    examples = index_facets(IndexReader(index_uri)).examples
    assert {example.representation for example in examples} == {"full"}
    searcher = open_index(index_uri)
    for example in examples:
        hit = searcher.search(example.query, k=1)[0]
        assert hit.text.startswith(example.query)
    assert len(set(examples)) == len(examples) == 6
