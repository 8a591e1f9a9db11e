"""Share of the exact results that a candidate generator keeps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline import Index
from pipeline.config import parse
from pipeline.index import job
from pipeline.index.isotropy import mean_cosine
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search import isotropy
from pipeline.search.isotropy import generator_remark, kept_by
from pipeline.search.searcher import Searcher
from tests.index.test_isotropy import vectors_with
from tests.tiny.anisotropic import ANISOTROPIC


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


def test_encoder_with_a_shared_direction(cluster, tmp_path):
    """An item is found by some of its words, through the index job, candidates and the search."""
    rng = np.random.default_rng(0)
    items = ["_".join(f"w{word}" for word in rng.permutation(4000)[:8]) for _ in range(600)]
    lines = [json.dumps({"_id": item, "text": "any"}) for item in items]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    given = {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": str(tmp_path)},
        "encoder": {"class": ANISOTROPIC, "seconds": 0.0, "num_tokens": 8, "dim": 64},
        "representations": [
            {"compressor": "none", "codec": codec} for codec in ("float32", "int8", "bits")
        ],
    }
    job.run(parse(IndexSpec, given), IndexResources(), job="1", report=lambda line: None)
    index = Index(given["index"])
    assert mean_cosine(index.reader, "full_float32") == pytest.approx(0.95, abs=0.01)
    for name in ("full_float32", "full_bits_1"):
        index.add_candidates({"name": "ivf", "num_centroids": 1024}, representation=name)
    queries = [" ".join(item.split("_")[:4]) for item in items[::20]]
    for name in ("full_bits_1", "full_int8"):
        assert first(index, queries, name) == items[::20]
    for name in ("full_float32", "full_bits_1"):
        found = first(index, queries, name, candidates="ivf", num_candidates=10)
        share = np.mean([a == b for a, b in zip(found, items[::20], strict=True)])
        assert share > 0.9


def first(index: Index, queries: list[str], representation: str, **options: object) -> list[str]:
    hits = index.searcher.search(queries, representation, k=1, **options)
    return [best[0].item_id for best in hits]
