"""Tests of the settings of the server."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from jobs.serve import _check_indexes
from pipeline.config import SpecError, parse
from pipeline.serve.settings import ServeSpec

INDEXES = {"texts": {"uri": "x"}}


@pytest.mark.parametrize(
    ("representation", "candidates", "message"),
    [
        (
            "hpool_2",
            {"generator": "lemur"},
            r"hpool_2\.generator must be one of exact, single, got",
        ),
        (
            "hpool_9",
            {"generator": "single"},
            r"hpool_9\.representation must be one of full, hpool_4",
        ),
        (
            "hpool_2",
            {"generator": "single", "num_candidates": 0},
            r"num_candidates must be .*got 0",
        ),
        ("hpool_2", {"name": "single"}, r"unknown field 'name'"),
    ],
)
def test_default_candidates_must_exist(index_uri, representation, candidates, message):
    served = {"uri": index_uri, "candidates": {representation: candidates}}
    with pytest.raises(SpecError, match=message):
        _check_indexes(parse(ServeSpec, {"indexes": {"texts": served}}))


def test_an_index_without_a_data_file_is_corrupted(index_uri, tmp_path):
    uri = str(shutil.copytree(index_uri, tmp_path / "broken"))
    next((tmp_path / "broken/items.lance/data").iterdir()).unlink()
    with pytest.raises(SpecError, match="index must be an intact index, .* is corrupted"):
        _check_indexes(parse(ServeSpec, {"indexes": {"texts": {"uri": uri}}}))


def test_rejects_max_replicas_below_num_replicas():
    with pytest.raises(SpecError, match="num_replicas, 3"):
        parse(ServeSpec, {"indexes": INDEXES, "searcher": {"num_replicas": 3, "max_replicas": 2}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"encoder": {"target_queueing_delay_s": 0.1}},
            "encoder.target_queueing_delay_s must be null without max_replicas, got 0.1",
        ),
        (
            {"gateway": {"max_replicas": 2, "target_queueing_delay_s": 0.1}},
            "gateway.target_queueing_delay_s must be null for the gateway, which has no queue",
        ),
        (
            {"indexes": {"texts": {"uri": "x", "gang": True}}},
            "indexes.texts.gang must be false for an index with one shard, got True",
        ),
        (
            {"indexes": {"texts": {"uri": "x", "device": "tpu"}}},
            "indexes.texts.device must be cpu, cuda or cuda:N, got 'tpu'",
        ),
        (
            {"searcher": {"num_replicas": 2}, "single_process": True},
            "single_process must be false with settings of searcher, got True",
        ),
        (
            {
                "indexes": {"texts": {"uri": "x", "num_shards": 2, "gang": True}},
                "single_process": True,
            },
            "single_process must be false with indexes.texts.gang, got True",
        ),
    ],
)
def test_rejects_invalid_placement_and_autoscaling(settings: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        parse(ServeSpec, {"indexes": INDEXES, **settings})
