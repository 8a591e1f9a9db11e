"""Tests of the recompression job against the index job, and of its resumption."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import config
from pipeline.config import SpecError
from pipeline.index import add, job, recompress
from pipeline.index.add import Progress
from pipeline.index.columns import all_representations, representation_fields
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stages import Compress
from pipeline.index.status import status
from pipeline.index.writer import IndexWriter, LeaseHeld
from pipeline.schema import column_metadata
from pipeline.search.searcher import open_index

pytestmark = pytest.mark.usefixtures("cluster")

DOCUMENTS = {
    "wing": "The lift of a wing in a propeller slipstream was measured at many angles.",
    "heat": "Heat transfer to a blunt body at hypersonic speed, and its boundary layer.",
    "shell": "Thin cylindrical shells buckle under axial compression.",
    "bread": "Bake the bread until its crust is golden.",
    "flow": "Supersonic flow past a cone.",
    "yeast": "Knead flour, water, salt and yeast.",
}
HPOOL = {"compressor": {"name": "hpool", "num_vectors": 4}}
SAMER = {"compressor": {"name": "samer", "num_vectors": 4}}
FULL = {"compressor": "none"}


def make_index(uri: Path, collection: Path, *representations: dict, **fields: Any) -> None:
    """Indexes the collection with two items per fragment."""
    given = {
        "index": str(uri),
        "source": {"name": "text", "path": str(collection)},
        "encoder": "minilm",
        "representations": list(representations),
        "unit_items": 2,
        "fragment_items": 2,
        **fields,
    }
    spec = config.parse(IndexSpec, given)
    job.run(spec, IndexResources(), job="1", report=lambda line: None)


def spec(uri: Path, *representations: dict, **fields: Any) -> recompress.RecompressSpec:
    """Returns a recompression spec."""
    given = {"index": str(uri), "representations": list(representations), **fields}
    return config.parse(recompress.RecompressSpec, given)


def run(job_spec: recompress.RecompressSpec) -> Progress:
    """Runs the job without printing."""
    resources = recompress.RecompressResources()
    return add.run(recompress.Recompression(job_spec, resources), job="2", report=lambda line: None)


def rows(uri: Path) -> dict[str, dict[str, Any]]:
    """Returns the rows by item id and checks that ids are unique."""
    table = IndexReader(str(uri)).dataset.to_table()
    by_id = {row["item_id"]: row for row in table.to_pylist()}
    assert len(by_id) == table.num_rows
    return by_id


@pytest.fixture(scope="module")
def original(cluster, tmp_path_factory) -> Path:
    """Index of three fragments with only the uncompressed representation."""
    folder = (
        tmp_path_factory.mktemp("original") / "collection"
    )  # named like the fixture `collection`
    folder.mkdir()
    lines = [json.dumps({"_id": i, "text": text}) for i, text in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    make_index(folder.parent / "index", folder, FULL)
    assert len(IndexReader(str(folder.parent / "index")).dataset.get_fragments()) == 3
    return folder.parent / "index"


@pytest.fixture
def uri(original: Path, tmp_path: Path) -> Path:
    """Copy of the original index."""
    return Path(shutil.copytree(original, tmp_path / "index"))


def test_columns_equal_those_of_the_index_job(tmp_path, collection, uri):
    make_index(tmp_path / "at_once", collection(**DOCUMENTS), FULL, HPOOL, SAMER)
    progress = run(spec(uri, HPOOL, SAMER))
    assert (progress.done, progress.rows) == (3, 6)
    actual, expected = rows(uri), rows(tmp_path / "at_once")
    assert actual.keys() == expected.keys()
    for item_id, row in expected.items():
        assert actual[item_id].keys() == row.keys()
        for name in ("hpool_4", "samer_4"):
            vectors = np.array(actual[item_id][name], dtype=np.float64)
            # Both the source and the result are rounded to float16.
            np.testing.assert_allclose(vectors, np.array(row[name], dtype=np.float64), atol=2e-3)
            assert actual[item_id][f"{name}_assignment"] == row[f"{name}_assignment"]
        unchanged = [n for n in row if not n.startswith(("hpool", "samer"))]
        assert all(actual[item_id][name] == row[name] for name in unchanged)

    # Search requires only the metadata of the column.
    schema, schema_at_once = (
        IndexReader(str(u)).dataset.schema for u in (uri, tmp_path / "at_once")
    )
    for name in ("hpool_4", "hpool_4_assignment", "samer_4", "samer_4_assignment"):
        assert column_metadata(schema.field(name)) == column_metadata(schema_at_once.field(name))
    found, best = (
        open_index(str(u)).search("how do shells buckle", "hpool_4", k=3, score="hybrid")
        for u in (uri, tmp_path / "at_once")
    )
    assert [hit.item_id for hit in found] == [hit.item_id for hit in best]
    assert found[0].item_id == "shell"
    assert any(match.spans for match in found[0].matches)
    np.testing.assert_allclose([h.score for h in found], [h.score for h in best], atol=1e-2)
    stored = status(str(uri))
    assert stored["representations"]["samer_4"]["filled"] == 1.0
    assert [done["kind"] for done in stored["jobs"]] == ["recompress", "index"]


def test_resumes_with_incomplete_fragments(uri):
    job_spec = spec(uri, HPOOL)
    # A run that died after committing one fragment.
    writer = IndexWriter(str(uri), "died")
    encoder_info, _ = recompress.stored_encoder(IndexReader(str(uri)), "full")
    (representation,) = all_representations(job_spec)
    writer.add_columns(representation_fields(representation, encoder_info, None))
    assert add.incomplete_fragments(writer.dataset, ["hpool_4"]) == {("hpool_4",): [0, 1, 2]}
    fill = recompress.FillFragment(
        str(uri),
        writer.dataset.version,
        "full",
        Compress(encoder_info, [representation], {}, ()),
    )
    filled = fill.fill(1)
    writer.commit_columns([(filled.fragment, filled.fields)])
    writer.release()
    before = rows(uri)
    assert sum(row["hpool_4"] is not None for row in before.values()) == 2
    files = data_files(uri, 1)

    progress = run(job_spec)
    assert (progress.done_before, progress.done, progress.rows) == (1, 2, 4)
    after = rows(uri)
    assert all(len(row["hpool_4"]) == 4 for row in after.values())
    assert data_files(uri, 1) == files

    version = IndexReader(str(uri)).dataset.version
    progress = run(job_spec)
    assert (progress.done_before, progress.done, progress.commits) == (3, 0, 0)
    assert rows(uri) == after
    # Three commits of the lease: taken, fenced and released.
    assert IndexReader(str(uri)).dataset.version == version + 3


def data_files(uri: Path, number: int) -> list[str]:
    """Returns the data files of a fragment that contain a current column."""
    files = IndexReader(str(uri)).dataset.get_fragment(number).data_files()
    return [file.path for file in files if any(field >= 0 for field in file.fields)]


def test_committed_fragments_survive_a_failure(uri, monkeypatch):
    job_spec = spec(uri, HPOOL, commit_fragments=1)
    commit = IndexWriter.commit_columns

    def commit_once(writer, fragments):
        monkeypatch.setattr(IndexWriter, "commit_columns", fail)
        return commit(writer, fragments)

    def fail(writer, fragments):
        raise OSError("the network is gone")

    monkeypatch.setattr(IndexWriter, "commit_columns", commit_once)
    with pytest.raises(OSError, match="the network is gone"):
        run(job_spec)
    monkeypatch.undo()
    assert sum(row["hpool_4"] is not None for row in rows(uri).values()) == 2
    assert status(str(uri))["lease"] is None
    assert status(str(uri))["jobs"][0]["state"] == "failed"
    progress = run(job_spec)
    assert (progress.done_before, progress.done) == (1, 2)
    assert all(row["hpool_4"] for row in rows(uri).values())


def test_adding_a_representation_keeps_the_others(uri):
    run(spec(uri, HPOOL))
    files = [data_files(uri, number) for number in range(3)]
    random = {"compressor": {"name": "random", "num_vectors": 2}, "keep_assignment": False}
    progress = run(spec(uri, HPOOL, SAMER, random))
    assert (progress.done, progress.rows) == (3, 6)
    assert all(row["samer_4"] and row["random_2"] for row in rows(uri).values())
    for number in range(3):
        assert data_files(uri, number)[: len(files[number])] == files[number]


@pytest.mark.heavy
def test_later_rows_are_filled_by_another_run(tmp_path, collection, uri):
    run(spec(uri, HPOOL))
    first = rows(uri)
    more = {**DOCUMENTS, "bread": "Bake it until the crust is dark.", "cone": "A cone in a stream."}
    make_index(uri, collection(**more), FULL)  # the spec does not list hpool_4
    assert {i for i, row in rows(uri).items() if row["hpool_4"] is None} == {"bread", "cone"}
    progress = run(spec(uri, HPOOL))
    assert progress.rows == 2
    after = rows(uri)
    assert all(row["hpool_4"] for row in after.values())
    assert all(after[i] == first[i] for i in first if i != "bread")
    assert after["bread"]["hpool_4"] != first["bread"]["hpool_4"]


@pytest.mark.heavy
def test_rows_without_source_vectors_remain_null(collection, uri):
    run(spec(uri, HPOOL))
    make_index(uri, collection(**DOCUMENTS, cone="A cone in a stream."), HPOOL)
    assert rows(uri)["cone"]["full"] is None
    progress = run(spec(uri, SAMER))  # one fragment has nothing to compress
    assert (progress.done, progress.rows) == (4, 6)
    assert {i for i, row in rows(uri).items() if row["samer_4"] is None} == {"cone"}
    assert run(spec(uri, SAMER)).done == 0

    IndexReader(
        str(uri)
    ).dataset.optimize.compact_files()  # one fragment now has rows with and without it
    assert len(IndexReader(str(uri)).dataset.get_fragments()) == 1
    two = {"compressor": {"name": "random", "num_vectors": 2}}
    assert run(spec(uri, two)).rows == 6
    after = rows(uri)
    assert {i for i, row in after.items() if row["random_2"] is None} == {"cone"}
    assert after["cone"]["hpool_4"]
    assert status(str(uri))["representations"]["random_2"]["filled"] == pytest.approx(6 / 7)


def test_rejects_invalid_specs_before_writing(uri):
    run(spec(uri, HPOOL))
    version = IndexReader(str(uri)).dataset.version
    other = {"compressor": {"name": "random", "num_vectors": 4, "seed": 1}, "id": "hpool_4"}
    for source, representation, message in [
        (
            "full",
            other,
            r"representations.hpool_4.compressor must be .*, as in the index, got .*; set `id`",
        ),
        (
            "hpool_4",
            SAMER,
            "source must be an uncompressed representation, got 'hpool_4', which is compressed",
        ),
        (
            "fully",
            SAMER,
            "source must be one of full, hpool_4, got 'fully', which is not in the index",
        ),
    ]:
        with pytest.raises(SpecError, match=message):
            run(spec(uri, representation, source=source))
    with pytest.raises(SpecError, match="representations must be a non-empty list"):
        run(spec(uri))
    with pytest.raises(
        SpecError, match="representations must be unique .*, got 'hpool_4', which occurs twice"
    ):
        run(spec(uri, HPOOL, HPOOL))
    with pytest.raises(
        SpecError, match="index must be the URI of an index .*none', which does not exist"
    ):
        run(spec(uri.parent / "none", HPOOL))
    assert not (uri.parent / "none").exists()
    assert IndexReader(str(uri)).dataset.schema.names[-1] == "hpool_4_assignment"
    assert IndexReader(str(uri)).dataset.version <= version + 3  # one of the runs took the lease


def test_concurrent_job_reports_the_writer(uri):
    holder = IndexWriter(str(uri), "the-first-job")
    with pytest.raises(
        LeaseHeld, match="^index must be an index without a writer, .* by job the-first"
    ):
        run(spec(uri, HPOOL))
    holder.release()


def test_rejects_corrupted_data_files(uri):
    for file in (uri / "items.lance/data").iterdir():
        os.truncate(file, 100)
    for work in (
        lambda: run(spec(uri, SAMER)),
        lambda: status(str(uri)),
        lambda: open_index(str(uri)).search("wings"),
    ):
        with pytest.raises(
            SpecError,
            match=r"^index must be an intact index, got '.*', which is corrupted \(",
        ):
            work()
