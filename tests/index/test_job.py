"""Tests of the index job on Ray and Lance: indexed and rejected items, and repeated runs."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.eval.planning.trial import dry_run
from pipeline.index import job
from pipeline.index.counts import Counts
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.status import status
from pipeline.index.writer import IndexWriter, LeaseHeld
from tests.conftest import actor_pools
from tests.tiny import SLEEPING

pytestmark = pytest.mark.usefixtures("cluster")

SLEEPING = {"class": SLEEPING, "seconds": 0.0, "num_tokens": 12, "dim": 16}


def spec(tmp_path: Path, source: Path | dict, **fields: Any) -> IndexSpec:
    """Returns a spec with a fast encoder and two representations."""
    source = source if isinstance(source, dict) else {"name": "text", "path": str(source)}
    given = {
        "index": str(tmp_path / "index"),
        "source": source,
        "encoder": SLEEPING,
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "samer", "num_vectors": 4}},
        ],
        "unit_items": 2,
        **fields,
    }
    return config.parse(IndexSpec, given)


def run(job_spec: IndexSpec, **options: Any) -> Counts:
    """Runs the job without printing."""
    return job.run(job_spec, IndexResources(), job="test", report=lambda line: None, **options)


def rows(job_spec: IndexSpec) -> dict[str, dict[str, Any]]:
    """Returns the rows by item id and checks that ids are unique."""
    table = IndexReader(job_spec.index).dataset.to_table()
    by_id = {row["item_id"]: row for row in table.to_pylist()}
    assert len(by_id) == table.num_rows
    return by_id


def rejects(job_spec: IndexSpec) -> dict[str, str]:
    """Returns the reject reasons by item id."""
    return {r["item_id"]: r["reason"] for r in IndexReader(job_spec.index).rejects().to_pylist()}


def test_second_run_processes_only_new_and_changed_items(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a="one", b="two", c="three"))
    first = run(job_spec)
    assert (first.listed, first.new, first.rejected) == (3, 3, 0)
    before = rows(job_spec)
    assert [len(before["a"][name]) for name in ("full", "samer_4")] == [12, 4]

    again = run(job_spec)
    assert (again.unchanged, again.done, again.commits) == (3, 0, 0)

    collection(a="one", b="two, changed", c="three", d="four")
    third = run(job_spec)
    assert (third.unchanged, third.new, third.replaced) == (2, 1, 1)
    after = rows(job_spec)
    assert set(after) == {"a", "b", "c", "d"}
    assert after["b"]["text"] == "two, changed"
    assert after["a"] == before["a"]


def test_rows_are_removed_only_with_remove_missing(tmp_path, collection):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"_id": "x", "text": "of another collection"}))
    run(spec(tmp_path, other))
    job_spec = spec(tmp_path, collection(a="one", b="two", c="three"))
    run(job_spec)
    collection(a="one", c="three")
    assert run(job_spec).removed == 0
    assert set(rows(job_spec)) == {"a", "b", "c", "x"}
    assert run(job_spec, remove_missing=True).removed == 1
    assert set(rows(job_spec)) == {"a", "c", "x"}


def test_missing_items_are_reported_and_removed_with_their_source(tmp_path):
    folders = {name: tmp_path / name for name in ("a", "b", "other")}
    for name, folder in folders.items():
        folder.mkdir()
        for number in (1, 2):
            (folder / f"{name}{number}.txt").write_text(f"{name} {number}")
    (folders["b"] / "empty.txt").write_text("")

    def run_sources(number: int, *names: str, **options: Any) -> tuple[Counts, str]:
        fields = {"index": str(tmp_path / "index"), "representations": [{"compressor": "none"}]}
        fields["source"] = [{"name": "text", "path": str(folders[name])} for name in names]
        job_spec, lines = config.parse(IndexSpec, fields), list[str]()
        resources, job_id = IndexResources(), f"2026010{number}-000000-0000"
        progress = job.run(job_spec, resources, job=job_id, report=lines.append, **options)
        return progress, "\n".join(lines)

    _, text = run_sources(1, "a", "b")
    assert "rejected 1: empty" in text and "(empty.txt)" in text and "--rejects" in text
    assert "no longer listed" not in text
    run_sources(2, "other")
    (folders["a"] / "a1.txt").unlink()
    for number in (3, 4):  # the last run has listed `b` no longer
        progress, text = run_sources(number, "a")
        assert (progress.missing, progress.removed) == (3, 0)
        assert "3 indexed items are no longer listed (a1.txt, b1.txt, b2.txt)" in text
        assert "rerun with --remove-missing" in text
    (folders["a"] / "a2.txt").rename(folders["a"] / "a2.pdf")  # no text is left in a folder
    progress, text = run_sources(5, "a", "other")
    assert "source[0].path" in text and "contains no such files" in text
    assert progress.missing == 4
    progress, text = run_sources(6, "a", "other", remove_missing=True)
    assert (progress.removed, progress.unchanged) == (4, 2)
    assert set(IndexReader(str(tmp_path / "index")).dataset.to_table()["item_id"].to_pylist()) == {
        "other1.txt",
        "other2.txt",
    }
    for path in folders["other"].iterdir():
        path.unlink()
    with pytest.raises(SpecError, match=r"source\[0\].path must be a folder with .* files"):
        run_sources(7, "a", "other")


@pytest.mark.heavy
def test_unreadable_items_are_not_removed(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    packed = gzip.compress(b'{"_id": "a", "text": "one"}\n{"_id": "b", "text": "two"}\n')
    (folder / "two.jsonl.gz").write_bytes(packed)
    for name in ("c", "d"):
        (folder / f"{name}.txt").write_text(name)
    job_spec = spec(tmp_path, folder)
    run(job_spec)
    (folder / "c.txt").write_text("")  # exists but has no content
    (folder / "d.txt").unlink()
    (folder / "two.jsonl.gz").write_bytes(packed[:20])
    with pytest.raises(JobError, match="nothing was removed: 1 parts of the source cannot be read"):
        run(job_spec, remove_missing=True)
    assert set(rows(job_spec)) == {"a", "b", "c.txt", "d.txt"}
    (folder / "two.jsonl.gz").write_bytes(packed)
    assert run(job_spec, remove_missing=True).removed == 1
    assert set(rows(job_spec)) == {"a", "b", "c.txt"}


def test_readable_item_is_removed_from_rejects(tmp_path):
    (tmp_path / "notes").mkdir()
    note = tmp_path / "notes/a.txt"
    job_spec = spec(tmp_path, tmp_path / "notes")
    note.write_text("one")
    (tmp_path / "notes/b.txt").write_text("two")
    run(job_spec)
    note.write_bytes(b"\xff")
    assert run(job_spec).rejected == 1
    assert IndexReader(job_spec.index).rejects()["item_id"].to_pylist() == ["a.txt"]
    note.write_text("one")
    assert run(job_spec).unchanged == 2
    assert IndexReader(job_spec.index).rejects().num_rows == 0


@pytest.mark.heavy
def test_rejects_unknown_retry_reason(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a="one", b=" "))
    run(job_spec)
    message = (
        "--retry-rejects must be 'empty text', got 'nothing', which is not the reason of any reject"
    )
    with pytest.raises(SpecError, match=message):
        run(job_spec, retry_rejects=("nothing",))


def test_rejects_index_with_truncated_data_file(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a="one"))
    run(job_spec)
    (file,) = (tmp_path / "index/items.lance/data").iterdir()
    os.truncate(file, 10)
    with pytest.raises(
        SpecError,
        match=r"^index must be an intact index, got .*, which is corrupted \(1 of 1 data files have"
        r" another size\)",
    ):
        run(job_spec)


def test_rejects_are_counted(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "good.txt").write_text("readable words")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "empty.txt").touch()
    # Three shards list the same id; only one has an item.
    for name, text in (("a", ""), ("b", ""), ("c", "words")):
        (folder / f"{name}.jsonl").write_text(json.dumps({"_id": "x", "text": text}))
    job_spec = spec(tmp_path, folder)
    first = run(job_spec)
    assert (first.listed, first.new, first.rejected, first.rejected_before) == (6, 2, 4, 0)
    expected = {"latin.txt": "not UTF-8", "empty.txt": "empty text"}
    disambiguated = {"x~000000:0": "empty text", "x~000001:0": "empty text"}
    assert rejects(job_spec) == expected | disambiguated
    assert status(job_spec.index)["rejects"] == {"empty text": 3, "not UTF-8": 1}

    again = run(job_spec)
    assert (again.unchanged, again.rejected_before, again.rejected) == (2, 4, 0)
    assert rejects(job_spec) == expected | disambiguated

    (folder / "empty.txt").write_text("words at last")
    third = run(job_spec)
    assert (third.new, third.rejected_before) == (1, 3)
    assert rejects(job_spec) == {"latin.txt": "not UTF-8"} | disambiguated


def test_duplicate_ids_keep_the_first(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [{"_id": "a", "text": f"text {i}"} for i in range(3)] + [{"_id": "b", "text": "b"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    job_spec = spec(tmp_path, path)
    for _ in range(2):  # the second run changes nothing
        progress = run(job_spec)
        assert (progress.listed, progress.indexed, progress.rejected) == (4, 2, 2)
        assert rows(job_spec)["a"]["text"] == "text 0"
        assert list(rejects(job_spec).values()) == ["duplicate id"] * 2


@pytest.mark.heavy
def test_id_of_another_collection_is_rejected(tmp_path, collection):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"_id": "a", "text": "the first a"}))
    run(spec(tmp_path, other))
    job_spec = spec(tmp_path, collection(a="another a", b="two"))
    progress = run(job_spec)
    assert (progress.new, progress.rejected) == (1, 1)
    assert rows(job_spec)["a"]["text"] == "the first a"
    assert list(rejects(job_spec).values()) == ["id of another source"]


def test_precomputed_vectors_and_their_rejects(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(4, 3, 8)).tolist()
    vectors[1][2][5] = float("nan")
    vectors[2] = [row[:7] for row in vectors[2]]
    table = pa.table({"id": ["good", "nan", "narrow", "none"], "vectors": [*vectors[:3], []]})
    path = tmp_path / "mine.parquet"
    pq.write_table(table, path)
    source = {"name": "vectors", "path": str(path), "dim": 8}
    encoder = {"name": "precomputed", "dim": 8, "label": "mine"}
    job_spec = spec(tmp_path, source, encoder=encoder)
    run(job_spec)
    assert set(rows(job_spec)) == {"good"}
    stored = np.array(rows(job_spec)["good"]["full"], dtype=np.float64)
    expected = np.array(vectors[0])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(stored, expected, atol=1e-3)
    assert rejects(job_spec) == {
        "nan": "non-finite vectors",
        "narrow": "wrong width",
        "none": "no vectors",
    }


@pytest.mark.heavy
def test_limit_takes_the_first_items(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a="1", b="2", c="3", d="4"))
    assert run(job_spec, limit=3).listed == 3
    assert set(rows(job_spec)) == {"a", "b", "c"}
    assert run(job_spec).unchanged == 3


@pytest.mark.heavy
def test_separate_compression_actors_write_the_same_rows(tmp_path, collection):
    documents = {f"d{i}": f"text {i}" for i in range(5)}
    together = spec(tmp_path, collection(**documents))
    run(together)
    apart = spec(tmp_path, collection(**documents), index=str(tmp_path / "apart"))
    profile = config.parse(IndexResources, {"compress": {"num_cpus": 0.5}})
    with actor_pools():
        job.run(apart, profile, job="test", report=lambda line: None)
    assert rows(apart) == rows(together)


def test_dry_run_writes_nothing(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a="one", b=" "))
    lines: list[str] = []
    dry_run(job_spec, IndexResources(), None, lines.append)
    output = "\n".join(lines)
    assert "listed 2 items, 1 unreadable" in output
    assert "12 tokens per item" in output
    assert not (tmp_path / "index").exists()


def test_rejects_index_of_another_encoder(tmp_path, collection):
    run(spec(tmp_path, collection(a="one")))
    other = spec(tmp_path, collection(a="one", b="two"), encoder={**SLEEPING, "dim": 24})
    with pytest.raises(
        SpecError,
        match="encoder must be the encoder that filled .*, got '.*:Sleeping', which has the finger",
    ):
        run(other)
    assert set(rows(other)) == {"a"}


def test_rejects_other_settings_and_new_representations(tmp_path, collection):
    run(spec(tmp_path, collection(a="one")))
    samer = {"compressor": {"name": "samer", "num_vectors": 4, "gamma": 0.5}, "id": "samer_4"}
    with pytest.raises(
        SpecError,
        match="representations.samer_4.compressor must be .*, as in the index, got .*; set `id`",
    ):
        run(spec(tmp_path, collection(a="one"), representations=[samer]))
    hpool = {"name": "hpool", "num_vectors": 4}
    with pytest.raises(
        SpecError,
        match="representations must be one of .*, got 'hpool_4', which is not in this index; add it"
        " with `maxray add representations",
    ):
        run(spec(tmp_path, collection(a="one"), representations=[{"compressor": hpool}]))


def test_concurrent_job_reports_the_writer(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a="one"))
    holder = IndexWriter(job_spec.index, "the-first-job")
    with pytest.raises(
        LeaseHeld, match="^index must be an index without a writer, .* by job the-first"
    ):
        run(job_spec)
    holder.release()
    assert run(job_spec).new == 1


def test_rejects_partially_deleted_index(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a="one"))
    run(job_spec)
    for file in (tmp_path / "index/items.lance/data").iterdir():
        file.unlink()
    with pytest.raises(
        SpecError, match=r"^index must be an intact index, got .*1 of 1 data files are"
    ):
        run(job_spec)
    for file in (tmp_path / "index/items.lance/_versions").iterdir():
        file.unlink()
    with pytest.raises(
        SpecError, match="^index must be an intact index, got .*, which is corrupted"
    ):
        run(job_spec)


def test_empty_index_accepts_another_spec(tmp_path, collection):
    job_spec = spec(tmp_path, collection(a=" "))
    assert run(job_spec).new == 0
    other = spec(
        tmp_path,
        collection(a="words"),
        encoder={**SLEEPING, "dim": 24},
        representations=[{"compressor": {"name": "hpool", "num_vectors": 3}}],
    )
    assert run(other).new == 1
    assert list(IndexReader(other.index).representations()) == ["hpool_3"]


def test_item_with_too_many_tokens_is_rejected(tmp_path, collection):
    long = {**SLEEPING, "num_tokens": 65535, "dim": 2}
    job_spec = spec(tmp_path, collection(a="words"), encoder=long)
    assert run(job_spec).rejected == 1
    assert rejects(job_spec)["a"].startswith("more than 65,534 tokens")
