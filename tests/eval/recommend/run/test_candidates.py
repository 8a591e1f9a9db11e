"""Combinations of method, budget and codec."""

import pytest

from pipeline.config import SpecError
from pipeline.eval.recommend.run import list_candidates
from pipeline.eval.recommend.spec import RecommendSpec
from pipeline.index.reader import IndexReader


def candidates(index_uri, **fields):
    index = IndexReader(index_uri)
    spec = RecommendSpec(index=index_uri, **fields)
    return list_candidates(spec, index, index.representation("full").encoder, "content")


def test_combinations(index_uri):
    found = candidates(
        index_uri, methods=["none", "hpool"], budgets=[1, 4], codecs=["float16", "int8"]
    )
    assert [r.id for r in found.representations] == [
        *("full", "full_int8"),
        *("hpool_1", "hpool_1_int8", "hpool_4", "hpool_4_int8"),
    ]
    assert not found.left_out


def test_repeated_settings_are_compared_once(index_uri):
    found = candidates(
        index_uri, methods=["hpool", "hpool"], budgets=[4, 4], codecs=["int8", "int8"]
    )
    assert [r.id for r in found.representations] == ["hpool_4_int8"]


def test_methods_that_stored_vectors_cannot_provide_are_left_out(index_uri):
    methods = ["hpool", "sap", "memtok", "seqresize", "hpc", "adaptive_eos"]
    found = candidates(index_uri, methods=methods, budgets=[2], codecs=["float16", "residual"])
    assert [r.id for r in found.representations] == ["hpool_2"]
    assert found.left_out["sap"].startswith("needs the attention statistic ")
    assert found.left_out["memtok"] == "needs the vectors of appended tokens, which are not stored"
    assert found.left_out["seqresize"] == "needs trained weights"
    assert found.left_out["hpc"] == found.left_out["residual"] == "is fitted on the corpus"
    with pytest.raises(SpecError, match="seqresize needs trained weights"):
        candidates(index_uri, methods=["seqresize"])
