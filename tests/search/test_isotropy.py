"""Share of the exact results that a candidate generator keeps."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline import Index
from pipeline.search import isotropy
from pipeline.search.isotropy import generator_remark, kept_by
from pipeline.search.searcher import Searcher
from tests.index.test_isotropy import vectors_with


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Index:
    index = Index(str(tmp_path_factory.mktemp("isotropy") / "index"))
    vectors = vectors_with(0.95, num_items=2000)
    index.add([f"i{number}" for number in range(len(vectors))], vectors)
    index.add_candidates("lemur")
    return index


def test_share_is_that_of_the_searches(index):
    share = kept_by(index.searcher, "full", "lemur")
    assert 0.3 < share < 1
    assert kept_by(index.searcher, "full", "exact") == 1
    assert share == kept_by(index.searcher, "full", "lemur")  # deterministic
    remark = generator_remark(index.reader, "full", "lemur")
    assert f"lemur keeps {share:.0%} of the exact 10 best items of full" in remark


def test_losses_are_a_warning(index, monkeypatch):
    monkeypatch.setattr(isotropy, "MIN_KEPT", 1.0)
    remark = generator_remark(index.reader, "full", "lemur")
    assert remark.startswith("warning: lemur keeps ")
    assert "(mean cosine of the vectors 0.95); use another generator" in remark


def test_one_shard_of_a_large_index_is_searched(index, monkeypatch):
    monkeypatch.setattr(isotropy, "MAX_ITEMS", 500)
    shards: list[object] = []
    searcher = isotropy.Searcher

    def opened(*arguments, **options) -> Searcher:
        shards.append(options["shard"])
        return searcher(*arguments, **options)

    monkeypatch.setattr(isotropy, "Searcher", opened)
    assert "of the exact 10 best items" in generator_remark(index.reader, "full", "lemur")
    assert shards == [(0, 4)]


def test_items_without_vectors_are_no_queries(tmp_path):
    index = Index(str(tmp_path / "index"))
    index.add(["a"], [np.ones((2, 4))])
    index.delete(["a"])
    assert kept_by(index.searcher, "full", "exact") == 1
