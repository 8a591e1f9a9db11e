"""The index job on real Ray and Lance: what is indexed and rejected, what a second run does."""

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
from pipeline.index import job
from pipeline.index.dry_run import dry_run
from pipeline.index.progress import Progress
from pipeline.index.reader import Index
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.status import status
from pipeline.index.writer import IndexWriter, LeaseHeld

pytestmark = pytest.mark.usefixtures("cluster")

SLEEPING = {"name": "sleeping", "seconds": 0.0, "num_tokens": 12, "dim": 16}


def spec(tmp_path: Path, source: Path | dict, **fields: Any) -> IndexSpec:
    """A spec with a quick encoder and two representations."""
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


def run(a_spec: IndexSpec, **options: Any) -> Progress:
    """Runs the job, quietly."""
    return job.run(a_spec, IndexResources(), job="test", report=lambda line: None, **options)


def rows(a_spec: IndexSpec) -> dict[str, dict[str, Any]]:
    """Every row of the index by item id; none may be there twice."""
    table = Index(a_spec.index).dataset.to_table()
    there = {row["item_id"]: row for row in table.to_pylist()}
    assert len(there) == table.num_rows
    return there


def rejects(a_spec: IndexSpec) -> dict[str, str]:
    """Reasons by item id."""
    return {r["item_id"]: r["reason"] for r in Index(a_spec.index).rejects().to_pylist()}


def test_a_second_run_does_only_what_is_new_or_changed(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a="one", b="two", c="three"))
    first = run(a_spec)
    assert (first.listed, first.new, first.rejected) == (3, 3, 0)
    before = rows(a_spec)
    assert [len(before["a"][name]) for name in ("full", "samer_4")] == [12, 4]

    again = run(a_spec)
    assert (again.unchanged, again.done, again.commits) == (3, 0, 0)

    collection(a="one", b="two, changed", c="three", d="four")
    third = run(a_spec)
    assert (third.unchanged, third.new, third.replaced) == (2, 1, 1)
    after = rows(a_spec)
    assert set(after) == {"a", "b", "c", "d"}
    assert after["b"]["text"] == "two, changed"
    assert after["a"] == before["a"]


def test_items_that_left_the_source_go_only_when_asked(tmp_path, collection):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"_id": "x", "text": "of another collection"}))
    run(spec(tmp_path, other))
    a_spec = spec(tmp_path, collection(a="one", b="two", c="three"))
    run(a_spec)
    collection(a="one", c="three")
    assert run(a_spec).removed == 0
    assert set(rows(a_spec)) == {"a", "b", "c", "x"}
    assert run(a_spec, remove_missing=True).removed == 1
    assert set(rows(a_spec)) == {"a", "c", "x"}


def test_what_cannot_be_read_is_not_taken_for_removed(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    packed = gzip.compress(b'{"_id": "a", "text": "one"}\n{"_id": "b", "text": "two"}\n')
    (folder / "two.jsonl.gz").write_bytes(packed)
    for name in ("c", "d"):
        (folder / f"{name}.txt").write_text(name)
    a_spec = spec(tmp_path, folder)
    run(a_spec)
    (folder / "c.txt").write_text("")  # there, though there is nothing in it to index
    (folder / "d.txt").unlink()
    (folder / "two.jsonl.gz").write_bytes(packed[:20])
    with pytest.raises(JobError, match="nothing was removed: 1 parts of the source cannot be read"):
        run(a_spec, remove_missing=True)
    assert set(rows(a_spec)) == {"a", "b", "c.txt", "d.txt"}
    (folder / "two.jsonl.gz").write_bytes(packed)
    assert run(a_spec, remove_missing=True).removed == 1
    assert set(rows(a_spec)) == {"a", "b", "c.txt"}


def test_an_item_that_is_good_again_is_no_reject_any_more(tmp_path):
    (tmp_path / "notes").mkdir()
    note = tmp_path / "notes/a.txt"
    a_spec = spec(tmp_path, tmp_path / "notes")
    note.write_text("one")
    (tmp_path / "notes/b.txt").write_text("two")
    run(a_spec)
    note.write_bytes(b"\xff")
    assert run(a_spec).rejected == 1
    assert Index(a_spec.index).rejects()["item_id"].to_pylist() == ["a.txt"]
    note.write_text("one")
    assert run(a_spec).unchanged == 2
    assert Index(a_spec.index).rejects().num_rows == 0


def test_a_reason_for_which_nothing_is_rejected(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a="one", b=" "))
    run(a_spec)
    sentence = "--retry-rejects must be 'empty text', got 'nothing', which is not a reason"
    with pytest.raises(SpecError, match=sentence):
        run(a_spec, retry_rejects=("nothing",))


def test_an_index_with_a_cut_data_file_is_refused(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a="one"))
    run(a_spec)
    (file,) = (tmp_path / "index/items.lance/data").iterdir()
    os.truncate(file, 10)
    with pytest.raises(
        SpecError,
        match=r"an intact index, got .* corrupted \(1 of 1 data"
        r" files have another",
    ):
        run(a_spec)


def test_what_cannot_be_indexed_is_rejected_and_the_sum_holds(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "good.txt").write_text("readable words")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "empty.txt").touch()
    # One id in three shards, one of them an item: nothing is known before the first run.
    for name, text in (("a", ""), ("b", ""), ("c", "words")):
        (folder / f"{name}.jsonl").write_text(json.dumps({"_id": "x", "text": text}))
    a_spec = spec(tmp_path, folder)
    first = run(a_spec)
    assert (first.listed, first.new, first.rejected, first.rejected_before) == (6, 2, 4, 0)
    expected = {"latin.txt": "not UTF-8", "empty.txt": "empty text"}
    taken = {"x~000000:0": "empty text", "x~000001:0": "empty text"}
    assert rejects(a_spec) == expected | taken
    assert status(a_spec.index)["rejects"] == {"empty text": 3, "not UTF-8": 1}

    again = run(a_spec)
    assert (again.unchanged, again.rejected_before, again.rejected) == (2, 4, 0)
    assert rejects(a_spec) == expected | taken

    (folder / "empty.txt").write_text("words at last")
    third = run(a_spec)
    assert (third.new, third.rejected_before) == (1, 3)
    assert rejects(a_spec) == {"latin.txt": "not UTF-8"} | taken


def test_duplicate_ids_keep_the_first(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [{"_id": "a", "text": f"text {i}"} for i in range(3)] + [{"_id": "b", "text": "b"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    a_spec = spec(tmp_path, path)
    for _ in range(2):  # the second run changes nothing
        progress = run(a_spec)
        assert (progress.listed, progress.indexed, progress.rejected) == (4, 2, 2)
        assert rows(a_spec)["a"]["text"] == "text 0"
        assert list(rejects(a_spec).values()) == ["duplicate id"] * 2


def test_an_id_of_another_collection_is_not_replaced(tmp_path, collection):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"_id": "a", "text": "the first a"}))
    run(spec(tmp_path, other))
    a_spec = spec(tmp_path, collection(a="another a", b="two"))
    progress = run(a_spec)
    assert (progress.new, progress.rejected) == (1, 1)
    assert rows(a_spec)["a"]["text"] == "the first a"
    assert list(rejects(a_spec).values()) == ["id of another source"]


def test_own_vectors_and_what_is_wrong_with_them(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(4, 3, 8)).tolist()
    vectors[1][2][5] = float("nan")
    vectors[2] = [row[:7] for row in vectors[2]]
    table = pa.table({"id": ["good", "nan", "narrow", "none"], "vectors": [*vectors[:3], []]})
    path = tmp_path / "mine.parquet"
    pq.write_table(table, path)
    source = {"name": "vectors", "path": str(path), "dim": 8}
    encoder = {"name": "precomputed", "dim": 8, "label": "mine"}
    a_spec = spec(tmp_path, source, encoder=encoder)
    run(a_spec)
    assert set(rows(a_spec)) == {"good"}
    stored = np.array(rows(a_spec)["good"]["full"], dtype=np.float64)
    expected = np.array(vectors[0])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(stored, expected, atol=1e-3)
    assert rejects(a_spec) == {
        "nan": "non-finite vectors",
        "narrow": "wrong width",
        "none": "no vectors",
    }


def test_limit_takes_the_first_items(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a="1", b="2", c="3", d="4"))
    assert run(a_spec, limit=3).listed == 3
    assert set(rows(a_spec)) == {"a", "b", "c"}
    assert run(a_spec).unchanged == 3


@pytest.mark.heavy
def test_separate_compression_actors_give_the_same_rows(tmp_path, collection):
    documents = {f"d{i}": f"text {i}" for i in range(5)}
    together = spec(tmp_path, collection(**documents))
    run(together)
    apart = spec(tmp_path, collection(**documents), index=str(tmp_path / "apart"))
    profile = config.parse(IndexResources, {"compress": {"num_cpus": 0.5}})
    job.run(apart, profile, job="test", report=lambda line: None)
    assert rows(apart) == rows(together)


def test_a_dry_run_writes_nothing(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a="one", b=" "))
    lines: list[str] = []
    dry_run(a_spec, IndexResources(), None, lines.append)
    said = "\n".join(lines)
    assert "listed 2 items, of which 1 cannot be read" in said
    assert "12 tokens an item" in said
    assert not (tmp_path / "index").exists()


def test_an_index_made_by_another_encoder_is_refused(tmp_path, collection):
    run(spec(tmp_path, collection(a="one")))
    other = spec(tmp_path, collection(a="one", b="two"), encoder={**SLEEPING, "dim": 24})
    with pytest.raises(
        SpecError,
        match="encoder must be the encoder of .*, got 'sleeping', which has the fingerprint",
    ):
        run(other)
    assert set(rows(other)) == {"a"}


def test_other_settings_or_new_representations_are_refused(tmp_path, collection):
    run(spec(tmp_path, collection(a="one")))
    samer = {"compressor": {"name": "samer", "num_vectors": 4, "gamma": 0.5}, "id": "samer_4"}
    with pytest.raises(SpecError, match="representations.samer_4.compressor.*another `id`"):
        run(spec(tmp_path, collection(a="one"), representations=[samer]))
    hpool = {"name": "hpool", "num_vectors": 4}
    with pytest.raises(SpecError, match="hpool_4.*jobs.recompress"):
        run(spec(tmp_path, collection(a="one"), representations=[{"compressor": hpool}]))


def test_a_second_job_is_told_who_writes(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a="one"))
    holder = IndexWriter(a_spec.index, "the-first-job")
    with pytest.raises(LeaseHeld, match="is being written by job the-first-job"):
        run(a_spec)
    holder.release()
    assert run(a_spec).new == 1


def test_a_half_deleted_index_is_refused(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a="one"))
    run(a_spec)
    for file in (tmp_path / "index/items.lance/data").iterdir():
        file.unlink()
    with pytest.raises(SpecError, match=r"an intact index, got .* corrupted \(1 of 1 data files"):
        run(a_spec)
    for file in (tmp_path / "index/items.lance/_versions").iterdir():
        file.unlink()
    with pytest.raises(SpecError, match="is corrupted"):
        run(a_spec)


def test_a_run_that_committed_nothing_binds_nobody(tmp_path, collection):
    a_spec = spec(tmp_path, collection(a=" "))
    assert run(a_spec).new == 0
    other = spec(
        tmp_path,
        collection(a="words"),
        encoder={**SLEEPING, "dim": 24},
        representations=[{"compressor": {"name": "hpool", "num_vectors": 3}}],
    )
    assert run(other).new == 1
    assert list(Index(other.index).representations()) == ["hpool_3"]


def test_an_item_of_too_many_tokens_is_rejected(tmp_path, collection):
    long = {**SLEEPING, "num_tokens": 65535, "dim": 2}
    a_spec = spec(tmp_path, collection(a="words"), encoder=long)
    assert run(a_spec).rejected == 1
    assert rejects(a_spec)["a"].startswith("more than 65,534 tokens")
