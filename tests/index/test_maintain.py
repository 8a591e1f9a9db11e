"""Maintenance and deletion on real indexes of several small jobs."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest

from jobs import maintain as maintain_job
from jobs import status as status_job
from pipeline import config
from pipeline.config import SpecError, Stopped
from pipeline.eval.cache import Cache
from pipeline.index import add as add_job
from pipeline.index import delete, job, maintain
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.writer import IndexWriter, LeaseHeld
from pipeline.search import candidates_job
from pipeline.search.searcher import open_index
from tests.conftest import start_job

pytestmark = pytest.mark.usefixtures("cluster")

DIM = 8


def add(uri: Path, folder: Path, prefix: str, num: int) -> None:
    """Indexes vectors in fragments of 4 items."""
    folder.mkdir()
    rng = np.random.default_rng(len(prefix) + num)
    vectors = rng.normal(size=(3 * num, DIM)).astype(np.float32)
    np.save(folder / "vectors.npy", vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    np.save(folder / "lengths.npy", np.full(num, 3))
    (folder / "ids.txt").write_text("".join(f"{prefix}{i:02}\n" for i in range(num)))
    spec = {
        "index": str(uri),
        "source": {"name": "vectors", "path": str(folder), "dim": DIM},
        "encoder": {"name": "precomputed", "dim": DIM, "label": "test"},
        "representations": [{"compressor": "none"}],
        "unit_items": 4,
        "fragment_items": 4,
    }
    job.run(config.parse(IndexSpec, spec), IndexResources(), job=prefix, report=print)


@pytest.fixture(scope="module")
def original(cluster, tmp_path_factory) -> Path:
    """Index of two jobs with 28 items in 7 fragments, and codes of a candidate generator."""
    folder = tmp_path_factory.mktemp("maintain")
    for prefix, num in (("a", 12), ("b", 16)):
        add(folder / "index", folder / prefix, prefix, num)
    given = {"index": str(folder / "index"), "generator": {"name": "ivf", "num_centroids": 16}}
    spec = config.parse(candidates_job.CandidatesJobSpec, given)
    resources = candidates_job.CandidatesResources()
    add_job.run(candidates_job.Candidates(spec, resources), job="codes", report=print)
    return folder / "index"


@pytest.fixture
def uri(original, tmp_path) -> str:
    shutil.copytree(original, tmp_path / "index")
    return str(tmp_path / "index")


def rows(uri: str) -> list[dict[str, Any]]:
    return IndexReader(uri).dataset.to_table().sort_by("item_id").to_pylist()


def maintained(uri: str, **fields: Any) -> maintain.Progress:
    spec = config.parse(maintain.MaintainSpec, {"index": uri, **fields})
    return maintain.run(spec, job="m", report=print)


def query() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4, DIM)).astype(np.float32)


def test_merges_fragments_and_keeps_rows(uri):
    before = rows(uri)
    options = {"candidates": "ivf", "num_candidates": 10, "k": 5}
    hits = open_index(uri).rank([query()], **options)[0].scores_by_item()
    reader = IndexReader(uri)
    progress = maintained(uri, fragment_items=10)
    assert progress.fragments_before == 7
    assert progress.fragments == len(IndexReader(uri).fragments()) <= 4
    assert rows(uri) == before
    assert open_index(uri).rank([query()], **options)[0].scores_by_item() == hits
    assert len(reader.dataset.to_table()) == 28  # versions of the last day remain
    assert maintained(uri, fragment_items=10).merged == 0
    lookup = IndexReader(uri).dataset.scanner(filter="item_id = 'b03'").explain_plan()
    assert "ScalarIndexQuery" in lookup


def test_removes_old_versions_unused_files_and_listings(uri):
    folder = Path(uri, ITEMS)
    before = rows(uri)
    orphan = folder / "data" / "orphan.lance"  # as left by a killed job
    orphan.write_bytes(b"x" * 1000)
    progress = maintained(uri, retain_hours=0)
    assert progress.versions > 5 and progress.freed_bytes > 1000
    assert not orphan.exists() and rows(uri) == before
    assert len(lance.dataset(str(folder)).versions()) <= 4
    assert progress.jobs >= 2
    for name in "ab":
        left = {path.name for path in Path(uri, "jobs", name).iterdir()}
        assert left == {"summary.json", "spec.yaml"}
    with pytest.raises(SpecError, match="version must be a stored version"):
        IndexReader(uri, 2)


@pytest.mark.heavy
def test_a_later_job_resumes_after_maintenance(uri, original, tmp_path):
    maintained(uri, retain_hours=0)
    add(Path(uri), tmp_path / "d", "d", 4)
    assert len(IndexReader(uri)) == 32
    maintained(uri)
    assert [row["item_id"] for row in rows(uri)][-4:] == ["d00", "d01", "d02", "d03"]


def test_dry_runs_write_nothing(uri, capsys):
    version = IndexReader(uri).version
    maintain_job.main([uri, "--dry-run", "--fragment-items", "10"])
    assert "7 fragments: 7 would be merged" in capsys.readouterr().out
    maintain_job.main(["delete", uri, "--filter", "item_id < 'b'", "--dry-run"])
    assert "12 items are selected" in capsys.readouterr().out
    assert IndexReader(uri).version == version


def test_status_lists_maintenance(uri, capsys):
    maintained(uri, fragment_items=10)
    status_job.main([uri])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("maintain ") for line in lines) == 1


def test_stopped_maintenance_goes_on(uri, monkeypatch):
    before, check = rows(uri), Session.check

    def stop_after_a_commit(session: Session) -> None:
        check(session)
        if session._summary()["commits"] == 1:
            raise Stopped("stopped by the test")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Session, "check", stop_after_a_commit)
        maintained(uri, fragment_items=8)
    partly = len(IndexReader(uri).fragments())
    assert partly < 7 and rows(uri) == before
    progress = maintained(uri, fragment_items=8)
    assert progress.fragments_before == partly and progress.fragments <= partly
    assert rows(uri) == before


@pytest.mark.heavy
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
def test_killed_maintenance_loses_nothing(uri, delay):
    before = rows(uri)
    version = IndexReader(uri).version
    process = start_job("jobs.maintain", uri, "--fragment-items", "8", "--retain-hours", "0")
    deadline = time.monotonic() + 60
    while IndexReader(uri).version < version + 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # until the lease is taken
    time.sleep(delay)
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGKILL, 0)
    assert rows(uri) == before
    maintained(uri, fragment_items=8, retain_hours=0)
    assert rows(uri) == before


def test_only_one_job_writes(uri):
    writer = IndexWriter(uri, "other")
    for run in (lambda: maintained(uri), lambda: deleted(uri, filter="item_id = 'a00'")):
        with pytest.raises(LeaseHeld, match="is being written by job other"):
            run()
    writer.release()


def deleted(uri: str, **fields: Any) -> delete.Progress:
    spec = config.parse(delete.DeleteSpec, {"index": uri, **fields})
    return delete.run(spec, job="d", report=print)


def test_deletes_by_ids_and_by_filter(uri, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(delete, "COMMIT_ROWS", 5)
    monkeypatch.setattr(delete, "FILTER_IDS", 3)
    ids = ["a03", "b00", "b00", "b15", "a11", "unknown", "it's"]
    (tmp_path / "ids.txt").write_text("\n".join(ids) + "\n\n")
    maintain_job.main(["delete", uri, "--ids", str(tmp_path / "ids.txt")])
    assert "4 items are selected; 2 ids are not in the index" in capsys.readouterr().out
    assert len(IndexReader(uri)) == 24
    progress = deleted(uri, filter="item_id < 'b'")
    assert (progress.selected, progress.removed, progress.commits) == (10, 10, 2)
    left = [row["item_id"] for row in rows(uri)]
    assert left == [f"b{i:02}" for i in range(1, 15)]
    hits = open_index(uri).rank([query()], k=28, candidates="ivf", num_candidates=28)[0]
    assert sorted(hits.item_ids) == left
    maintained(uri, retain_hours=0)
    assert [row["item_id"] for row in rows(uri)] == left
    assert deleted(uri, filter="item_id < 'b'").commits == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "filter must be a condition unless ids are given, else null, got None"),
        (["--filter", "item_id = "], "filter must be"),
        (["--filter", "nothing = 1"], "filter must be"),
        (
            ["--filter", "item_id = 'a'", "--ids", "{ids}"],
            "filter must be a condition unless ids are given, else null, got .item_id",
        ),
        (["--ids", "/nowhere"], "--ids must be a UTF-8 text file .* got '/nowhere'"),
        (["--ids", "{empty}"], "--ids must be .* which is empty"),
        (["--ids", "{binary}"], "--ids must be .* which cannot be read"),
    ],
)
def test_invalid_deletions(uri, tmp_path, arguments, message):
    files = {name: str(tmp_path / name) for name in ("ids", "empty", "binary")}
    contents = {"ids": b"a00\n", "empty": b"\n", "binary": b"\xff\xfe\x00"}
    for name, content in contents.items():
        Path(files[name]).write_bytes(content)
    version = IndexReader(uri).version
    with pytest.raises(SpecError, match=message):
        maintain_job.main(["delete", uri, *(argument.format(**files) for argument in arguments)])
    assert len(IndexReader(uri)) == 28 and version <= IndexReader(uri).version


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fragment-items", "0"], "fragment_items must be greater than 0, got 0"),
        (["--deleted", "1.5"], "deleted must be less than or equal to 1, got 1.5"),
        (["--retain-hours", "-1"], "retain_hours must be greater than or equal to 0, got -1"),
        (["--retain-days", "-1"], "--retain-days must be at least 0, got -1"),
        (["--evaluations", "/nowhere"], "--evaluations must be the output folder of"),
    ],
)
def test_invalid_maintenance(uri, arguments, message):
    with pytest.raises(SpecError, match=message):
        maintain_job.main([uri, *arguments])
    with pytest.raises(SpecError, match="index must be the URI of an index"):
        maintain_job.main(["/nowhere"])


def test_unused_results_of_evaluations_are_removed(uri, tmp_path, capsys):
    output = tmp_path / "evaluation"
    output.mkdir()
    (output / "results.json").write_text("{}")
    cache = Cache(str(output))
    for key in ("old", "used", "new"):
        cache.write(key, {"IoU": 0.5})
    for key in ("old", "used"):
        os.utime(output / f"entries/{key}.json", (0, 0))
    assert cache.read("used", dict[str, float]) is not None

    maintain_job.main([uri, "--evaluations", str(output), "--dry-run"])
    assert "1 cached results would be removed" in capsys.readouterr().out
    assert len(list((output / "entries").iterdir())) == 3
    maintain_job.main([uri, "--evaluations", str(output), "--retain-days", "1"])
    assert "1 cached results removed" in capsys.readouterr().out
    assert {path.stem for path in (output / "entries").iterdir()} == {"used", "new"}
    assert (output / "results.json").exists()
    maintain_job.main([uri, "--evaluations", str(output), "--retain-days", "0"])
    assert not list((output / "entries").iterdir())
