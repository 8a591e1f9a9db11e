"""Tests of what stages load before they receive calls."""

from __future__ import annotations

import asyncio
import logging

from pipeline.config import digest
from pipeline.index.reader import IndexReader
from pipeline.serve.scheduler import Caller
from pipeline.serve.settings import Scale, ServedIndex, Timeouts
from pipeline.serve.stages import QueryEncoder, Ranker
from pipeline.serve.vectors import SearchVectors


def test_encoder_loads_models_of_preloaded_representations(index_uri):
    info = IndexReader(index_uri).representation("hpool_2").encoder
    encoder = QueryEncoder(Scale(), {"texts": ServedIndex(uri=index_uri, preload=["hpool_2"])})
    assert list(encoder._encoders) == [digest(info.spec)]
    (queries,) = asyncio.run(encoder.encode("hpool_2", info, ["wing"], Caller("a", 60)))
    assert queries.tokens[0].shape[1] == info.dim


def test_searcher_loads_preloaded_representations(index_uri):
    served = ServedIndex(uri=index_uri, preload=["hpool_2", "missing"])
    searcher = Ranker(served, Scale(), Timeouts(), (0, 2))
    stats = asyncio.run(searcher.record_routing_stats())
    vectors = SearchVectors("hpool_2", "maxsim", "exact")
    assert stats == {"loaded": {(IndexReader(index_uri).edition, vectors)}}
    reranker = Ranker(served, Scale(), Timeouts())
    assert asyncio.run(reranker.record_routing_stats()) == {"loaded": set()}


def test_stages_start_without_their_index(tmp_path, caplog):
    served = ServedIndex(uri=str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert QueryEncoder(Scale(), {"texts": served})._encoders == {}
        Ranker(served, Scale(), Timeouts(), (0, 1))
    assert len(caplog.records) == 2
    assert all("missing" in record.getMessage() for record in caplog.records)
