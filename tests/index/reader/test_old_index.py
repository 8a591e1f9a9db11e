"""Tests that an index written by an earlier version can be opened, searched and extended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from pipeline import config, open_index
from pipeline.index import add, backfill, job, recompress
from pipeline.index.columns import Representation, encoder_fields, representation_fields
from pipeline.index.info import representation_infos
from pipeline.index.reader import Index
from pipeline.index.status import status
from pipeline.schema import FORMAT_VERSION, column_metadata, with_metadata
from pipeline.scores import RENAMED
from pipeline.taps import Tap
from tests.conftest import ROOT

OLD = ROOT / "tests/index/fixtures/old_index"
EXPECTED = json.loads((OLD / "expected.json").read_text("utf-8"))


def copy_index(name: str, folder: Path) -> tuple[str, job.IndexSpec]:
    """Copies an old index and returns its URI and its spec."""
    uri = shutil.copytree(OLD / name, folder / name)
    spec = (OLD / f"{name}.yaml").read_text("utf-8")
    spec = spec.replace("old_index/shapes_colpali", f"{ROOT}/jobs/data/models/shapes_colpali")
    spec = spec.replace("old_index", str(OLD / "data"))
    fields = {**yaml.safe_load(spec), "index": str(uri)}
    return str(uri), config.parse(job.IndexSpec, fields, stored=True)


def in_this_version(column: pa.Field) -> pa.Field:
    """Returns a column of the old index with the name and metadata that this version writes."""
    metadata = column_metadata(column)
    role = metadata["role"]
    present_names = {"of": "field"} if role == "search" else {"of": "representation"}
    present_names["support"] = "assignment"
    metadata = {present_names.get(name, name): value for name, value in metadata.items()}
    metadata |= {"format_version": FORMAT_VERSION, "role": present_names.get(role, role)}
    if "assignment" in metadata:
        metadata["assignment"] = metadata["assignment"].replace("_support", "_assignment")
    return with_metadata(column.with_name(column.name.replace("_support", "_assignment")), metadata)


def silent(line: str) -> None:
    """Discards a report line."""


@pytest.fixture
def uri(tmp_path) -> str:
    """Copy of the index, as tests can write to it."""
    return str(shutil.copytree(OLD / "texts", tmp_path / "texts"))


def test_searches_return_the_same_hits(uri):
    searcher = open_index(uri)
    for name, by_score in EXPECTED["hits"].items():
        query = EXPECTED["queries"]["caption" if name.startswith("caption") else "content"]
        for score, hits in by_score.items():
            actual = searcher.search(query, name, k=3, score=RENAMED.get(score, score))
            assert [hit.item_id for hit in actual] == [item_id for item_id, _ in hits]
            assert [hit.score for hit in actual] == pytest.approx([s for _, s in hits], abs=1e-5)
    (hit,) = searcher.search(EXPECTED["queries"]["content"], "hpool_4", k=1)
    passages = [[list(p.span), list(p.box), p.confidence] for p in hit.passages]
    assert passages == EXPECTED["passages"]


@pytest.mark.parametrize("name", ["texts", "images"])
def test_status_is_the_same(name):
    summary = status(str(OLD / name))
    assert {key: summary[key] for key in EXPECTED[name]} == EXPECTED[name]
    assert [(record["kind"], record["state"]) for record in summary["jobs"]] == [("index", "done")]


def test_columns_of_the_same_spec_have_the_stored_metadata():
    """The metadata is byte-identical, except for the keys renamed in format version 3."""
    schema = Index(str(OLD / "texts")).schema
    present = pa.schema([in_this_version(c) for c in schema if column_metadata(c)])
    infos = representation_infos(schema)
    encoder_info = infos["full"].encoder
    fields = []
    for content in (encoder_info, encoder_info.for_field("caption")):
        fields += encoder_fields(
            content, keep_positions=True, keep_taps=[Tap("eos_row", layers="5")]
        )
    for info in infos.values():
        given = {"id": info.name, "compressor": info.compressor, "codec": info.codec}
        given |= {"field": info.field, "keep_assignment": info.assignment_column is not None}
        wanted = config.parse(Representation, given)
        fields += representation_fields(wanted, encoder_info, info.artefact, info.codec_artefact)
    assert len(fields) == 20
    for field in fields:
        assert field.equals(present.field(field.name), check_metadata=True)


def test_index_job_finds_nothing_to_do(cluster, tmp_path):
    uri, spec = copy_index("texts", tmp_path)
    schema = Index(uri).schema
    progress = job.run(spec, job.IndexResources(), job="2", report=silent)
    assert (progress.listed, progress.unchanged, progress.to_do) == (7, 7, 0)
    assert Index(uri).schema.equals(schema, check_metadata=True)


@pytest.mark.heavy
def test_index_job_fills_the_stored_columns(cluster, tmp_path):
    uri, spec = copy_index("texts", tmp_path)
    texts = tmp_path / "texts.jsonl"
    row = json.dumps(
        {"_id": "new", "title": "Heron", "text": "A heron waits at the edge of the lake."}
    )
    texts.write_text((OLD / "data/texts.jsonl").read_text("utf-8") + row + "\n", "utf-8")
    first, *others = spec.source.sources
    sources = [first.model_copy(update={"path": str(texts)}), *others]
    spec = spec.model_copy(update={"source": spec.source.model_copy(update={"sources": sources})})
    schema = Index(uri).schema
    progress = job.run(spec, job.IndexResources(), job="2", report=silent)
    assert (progress.listed, progress.unchanged, progress.new) == (8, 7, 1)
    index = Index(uri)
    assert index.schema.equals(schema, check_metadata=True)
    table = index.dataset.to_table(["hpool_4", "hpool_4_support"], filter="item_id = 'new'")
    (added,) = table.to_pylist()
    assert len(set(added["hpool_4_support"])) == len(added["hpool_4"]) == 4


def test_recompression_reproduces_the_stored_columns(cluster, tmp_path):
    uri, _ = copy_index("texts", tmp_path)
    names = ("hpool_4", "eos_3")
    index = Index(uri)
    wanted: list[dict[str, Any]] = [
        {"id": f"new_{name}", "compressor": index.representation(name).compressor} for name in names
    ]
    wanted.append({"compressor": "none", "codec": {"name": "residual", "num_centroids": 4}})
    spec = config.parse(recompress.RecompressSpec, {"index": uri, "representations": wanted})
    resources = recompress.RecompressResources()
    progress = add.run(recompress.Recompression(spec, resources), job="2", report=silent)
    assert (progress.fragments, progress.done) == (2, 2)
    columns = [column for name in names for column in (name, f"new_{name}")]
    table = Index(uri).dataset.to_table(columns=columns)
    for name in names:
        pairs = zip(table[name].to_pylist(), table[f"new_{name}"].to_pylist(), strict=True)
        for old, new in pairs:
            assert (old is None) == (new is None)
            if old is not None:
                np.testing.assert_allclose(old, new, atol=2e-3)
    assert (
        add.run(recompress.Recompression(spec, resources), job="3", report=silent).done_before == 2
    )


@pytest.mark.heavy
def test_backfill_adds_rerank_tokens(cluster, tmp_path):
    uri, spec = copy_index("images", tmp_path)
    spec = spec.model_copy(update={"rerank": f"{ROOT}/jobs/data/models/shapes_edje"})
    progress = add.run(backfill.Backfill(spec, job.IndexResources()), job="2", report=silent)
    assert (progress.done, progress.rows, progress.empty) == (1, 3, 0)
    hits = open_index(uri).search(np.ones((1, 64)), "hpool_4", k=3, explain=False)
    assert {hit.item_id for hit in hits} == {"sign.png", "ball.png", "wall.png"}
