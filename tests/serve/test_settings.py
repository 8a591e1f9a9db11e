"""Tests of the settings of the server."""

from __future__ import annotations

import shutil
from typing import Any

import lance
import pytest
import yaml

from jobs.serve import _check_indexes, _parser, _settings, index_name
from pipeline.config import SpecError, parse
from pipeline.serve.settings import ServeSpec

INDEXES = {"texts": {"uri": "x"}}


@pytest.mark.parametrize(
    ("representation", "candidates", "message"),
    [
        (
            "hpool_2",
            {"generator": "ivf"},
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


FEDERATION = {"members": {"a": {"index": "texts"}, "b": {"index": "./x"}}}


def test_members_of_federations_are_served_indexes():
    """By name, or by URI."""
    settings = {"indexes": INDEXES, "federations": {"both": FEDERATION}}
    spec = parse(ServeSpec, settings)
    assert [spec.member_index(m) for m in spec.federations["both"].members.values()] == [
        "texts",
        "texts",
    ]


@pytest.mark.parametrize(
    ("federations", "message"),
    [
        ({"texts": FEDERATION}, "federations must be names that no index has, got 'texts'"),
        (
            {"f": {"members": {"a": {"index": "y"}}}},
            "federations.f.members.a.index must be 'texts', got 'y', which is not served",
        ),
        (
            {"f": FEDERATION, "g": {"members": {"a": {"index": "f"}}}},
            "federations.g.members.a.index must be a served index, got 'f', which is a federation",
        ),
        (
            {"f": {"members": {"a": {"index": "f.yaml"}}}},
            "federations.f.members.a.index must be the URI of an index, got 'f.yaml', which is a "
            "spec (a federation cannot have federations)",
        ),
        (
            {"f": {"members": {"a": {"index": "texts", "version": 3}}}},
            "federations.f.members.a.version must be null, because a server searches the newest "
            "version, got 3",
        ),
        ({"f": {"members": {}}}, "federations.f.members must have at least 1 item"),
        ({"f": "none.yaml"}, "federations.f must be a YAML file with a mapping of fields to"),
        ({"a/b": FEDERATION}, "federations.a/b"),
    ],
)
def test_invalid_federations(federations, message):
    with pytest.raises(SpecError) as caught:
        parse(ServeSpec, {"indexes": INDEXES, "federations": federations})
    assert str(caught.value).startswith(message)


def settings_of(*arguments: str) -> ServeSpec:
    """Returns the settings of `maxray serve` after all checks."""
    settings = _settings(_parser().parse(arguments))
    _check_indexes(settings)
    return settings


def test_serving_a_federation_serves_its_indexes(index_uri, tmp_path, capsys):
    other = str(shutil.copytree(index_uri, tmp_path / "other.maxray"))
    lance.dataset(f"{other}/items.lance").update({"item_id": "concat('x', item_id)"})
    path = tmp_path / "all.yaml"
    members = {
        "a": {"index": index_uri, "weight": 0.5},
        "b": {"index": str(tmp_path / "other")},
        "c": {"index": index_uri, "score": "single_vector"},
    }
    path.write_text(yaml.safe_dump({"members": members, "join": "parent"}))
    spec = settings_of(str(path))
    name = index_name(index_uri)
    assert {key: served.uri for key, served in spec.indexes.items()} == {
        name: index_uri,
        "other": other,
    }
    (federation,) = spec.federations.values()
    indexes = {key: member.index for key, member in federation.members.items()}
    assert indexes == {"a": name, "b": "other", "c": name}
    assert (federation.join, federation.members["a"].weight) == ("parent", 0.5)
    assert "in common" not in capsys.readouterr().out
    assert settings_of(index_uri, str(path)).indexes == spec.indexes
    path.write_text(yaml.safe_dump({"members": {name: members[name] for name in ("a", "b")}}))
    settings_of(str(path))
    assert "all: member b has no item_id in common with another member" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"index": "none"}, "members.a.index must be the URI of an index of Maxray, got 'none'"),
        ({"index": "all.yaml"}, "members.a.index must be the URI of an index, got 'all.yaml'"),
        ({"representation": "ful"}, "federations.all.members.a.representation must be one of"),
        ({"candidates": "ivf"}, "federations.all.members.a.candidates must be "),
        ({"filter": "a = 1) OR (b = 2"}, "federations.all.members.a.filter must be "),
        ({"version": 1}, "federations.all.members.a.version must be null, because"),
    ],
)
def test_federations_that_cannot_be_served(index_uri, tmp_path, member, message):
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump({"members": {"a": {"index": index_uri, **member}}}))
    with pytest.raises(SpecError) as caught:
        settings_of(str(path))
    assert str(caught.value).startswith(message)
