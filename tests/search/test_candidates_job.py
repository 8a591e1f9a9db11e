"""Building, completing, refitting and dropping candidate generators on real indexes."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest

from jobs import export
from pipeline import config
from pipeline.config import ComponentSpec, SpecError, Stopped
from pipeline.index import add as add_job
from pipeline.index import job as index_job
from pipeline.index import recompress
from pipeline.index.add import Progress
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search import candidates_job
from pipeline.search.candidates import generator_columns, generators
from pipeline.search.candidates_job import CandidatesJobSpec, CandidatesResources
from pipeline.search.generators.ivf import Ivf
from pipeline.search.options import SearchOptions
from pipeline.search.searcher import open_index
from pipeline.search.sharded import ShardedSearcher
from pipeline.search.shards import merge_rankings
from tests.conftest import start_job

pytestmark = pytest.mark.usefixtures("cluster")

DIM, NUM_ITEMS = 16, 240
IVF = {"name": "ivf", "num_centroids": 64}
COLUMN = "full_ivf_1_candidates"


def clustered(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns unit vectors of items around common topics, and their numbers per item."""
    rng = np.random.default_rng(seed)
    topics = np.random.default_rng(99).normal(size=(30, DIM))
    lengths = rng.integers(3, 9, num)
    chosen = rng.integers(0, 30, (num, 3))
    parts = [topics[rng.choice(chosen[i], n)] for i, n in enumerate(lengths)]
    vectors = np.concatenate(parts) + 0.5 * rng.normal(size=(lengths.sum(), DIM))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32), lengths


def add_items(
    uri: Path, folder: Path, num: int, seed: int, prefix: str, fragment_items: int = 40
) -> None:
    """Indexes a folder of vectors."""
    folder.mkdir(exist_ok=True)
    vectors, lengths = clustered(num, seed)
    np.save(folder / "vectors.npy", vectors)
    np.save(folder / "lengths.npy", lengths)
    (folder / "ids.txt").write_text("".join(f"{prefix}{i:03}\n" for i in range(num)))
    given = {
        "index": str(uri),
        "source": {"name": "vectors", "path": str(folder), "dim": DIM},
        "encoder": {"name": "precomputed", "dim": DIM, "label": "test"},
        "representations": [{"compressor": "none"}],
        "unit_items": 40,
        "fragment_items": fragment_items,
    }
    spec = config.parse(IndexSpec, given)
    index_job.run(spec, IndexResources(), job="index", report=lambda line: None)


@pytest.fixture(scope="module")
def original(cluster, tmp_path_factory) -> Path:
    """Index of 240 items in 6 fragments."""
    folder = tmp_path_factory.mktemp("candidates")
    add_items(folder / "index", folder / "vectors", NUM_ITEMS, 0, "i")
    return folder / "index"


@pytest.fixture
def uri(original, tmp_path) -> Path:
    """Copy of the index that the test may change."""
    shutil.copytree(original, tmp_path / "index")
    return tmp_path / "index"


def spec(uri: Path, generator: dict[str, Any], **fields: Any) -> CandidatesJobSpec:
    """Returns the spec of a job."""
    given = {"index": str(uri), "generator": generator, "commit_fragments": 1, **fields}
    return config.parse(CandidatesJobSpec, given)


def build(uri: Path, generator: dict[str, Any], refit: bool = False, **fields: Any) -> Progress:
    """Runs the job without printing."""
    job_spec, resources = spec(uri, generator, **fields), CandidatesResources()
    return add_job.run(
        candidates_job.Candidates(job_spec, resources, refit=refit),
        job="2",
        report=lambda line: None,
    )


def codes(uri: Path, column: str) -> dict[str, Any]:
    """Returns the stored codes by item id."""
    table = lance.dataset(f"{uri}/{ITEMS}").to_table(columns=["item_id", column])
    return dict(zip(table["item_id"].to_pylist(), table[column].to_pylist(), strict=True))


def queries(num: int = 12) -> list[np.ndarray]:
    """Returns queries of 4 tokens."""
    vectors, _ = clustered(4 * num, 7)
    return list(vectors[: 4 * num].reshape(num, 4, DIM))


@pytest.fixture(scope="module")
def built(original, tmp_path_factory) -> Path:
    """Copy of the index with a generator, which tests do not change."""
    uri = tmp_path_factory.mktemp("built") / "index"
    shutil.copytree(original, uri)
    build(uri, IVF)
    return uri


def test_scores_are_exact_and_recall_is_high(built):
    searcher = open_index(str(built))
    exact = searcher.rank(queries(), k=10)
    options = {"k": 10, "candidates": "ivf"}
    found = searcher.rank(queries(), num_candidates=60, **options)
    shares = []
    for ranking, reference in zip(found, exact, strict=True):
        scores = reference.scores_by_item()
        for item_id, found_score in ranking.scores_by_item().items():
            if item_id in scores:
                assert found_score == scores[item_id]
        shares.append(len(set(ranking.item_ids) & set(scores)) / 10)
    assert np.mean(shares) > 0.9
    all_items = searcher.rank(queries(), num_candidates=NUM_ITEMS, **options)
    assert [r.item_ids for r in all_items] == [r.item_ids for r in exact]


def test_added_rows_are_scored_before_and_after_they_have_codes(uri, tmp_path):
    build(uri, IVF)
    before = codes(uri, COLUMN)
    add_items(uri, tmp_path / "new", 50, 1, "n")
    (info,) = IndexReader(str(uri)).candidates_columns.values()
    missing = [item for item, code in codes(uri, COLUMN).items() if code is None]
    assert sorted(missing) == [f"n{i:03}" for i in range(50)]
    vectors, lengths = clustered(50, 1)
    ends = lengths.cumsum()
    targets = [vectors[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    options = {"k": 1, "candidates": "ivf", "num_candidates": 1}
    hits = open_index(str(uri)).rank(targets, **options)
    assert [ranking.item_ids for ranking in hits] == [[f"n{i:03}"] for i in range(50)]

    progress = build(uri, IVF)
    assert (progress.done, progress.rows) == (progress.fragments - 6, 50)
    after = codes(uri, COLUMN)
    assert None not in after.values()
    assert {item: after[item] for item in before} == before
    assert IndexReader(str(uri)).candidates_columns[COLUMN] == info
    hits = open_index(str(uri)).rank(targets, **{**options, "num_candidates": 20})
    assert sum(r.item_ids == [f"n{i:03}"] for i, r in enumerate(hits)) >= 48
    assert build(uri, IVF).done == 0


def test_removed_rows_disappear(uri):
    build(uri, IVF)
    options = {"k": 5, "candidates": "ivf", "num_candidates": 40}
    (first,) = open_index(str(uri)).rank(queries(1), **options)
    lance.dataset(f"{uri}/{ITEMS}").delete(f"item_id = '{first.item_ids[0]}'")
    (second,) = open_index(str(uri)).rank(queries(1), **options)
    assert second.item_ids[:4] == first.item_ids[1:]


def test_build_resumes_before_it_has_measured(uri, tmp_path, monkeypatch):
    """Searches then keep the default numbers, and the next run measures the same as a whole one."""
    shutil.copytree(uri, tmp_path / "whole")
    build(tmp_path / "whole", IVF)

    def stop(*arguments: object) -> None:
        raise Stopped("stopped by the test")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(candidates_job.Candidates, "_measure", stop)
        build(uri, IVF)
    (stopped,) = IndexReader(str(uri)).candidates_columns.values()
    assert stopped.numbers is None
    assert len(open_index(str(uri)).rank(queries(1), k=5, candidates="ivf")[0].item_ids) == 5
    assert build(uri, IVF).done == 0
    (resumed,), (whole,) = (
        IndexReader(str(path)).candidates_columns.values() for path in (uri, tmp_path / "whole")
    )
    assert resumed.numbers["items"] == NUM_ITEMS and resumed == whole


@pytest.mark.heavy
def test_interrupted_build_resumes_with_the_same_bits(uri, original, tmp_path, monkeypatch):
    shutil.copytree(original, tmp_path / "whole")
    build(tmp_path / "whole", IVF)
    check = Session.check

    def stop_after_two_commits(session: Session) -> None:
        check(session)
        if session._summary()["commits"] == 2:
            raise Stopped("stopped by the test")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Session, "check", stop_after_two_commits)
        build(uri, IVF)
    done = [item for item, code in codes(uri, COLUMN).items() if code is not None]
    assert 0 < len(done) < NUM_ITEMS
    exact = [r.scores for r in open_index(str(uri)).rank(queries(), k=5)]
    options = {"k": 5, "candidates": "ivf", "num_candidates": 60}
    assert (
        np.mean(
            [
                a == b
                for a, b in zip(
                    [r.scores for r in open_index(str(uri)).rank(queries(), **options)],
                    exact,
                    strict=True,
                )
            ]
        )
        > 0.8
    )
    progress = build(uri, IVF)
    assert progress.done_before + progress.done == 6
    assert progress.done_before > 0
    assert codes(uri, COLUMN) == codes(tmp_path / "whole", COLUMN)
    artefacts = [info.artefact for info in IndexReader(str(uri)).candidates_columns.values()]
    whole = IndexReader(str(tmp_path / "whole")).candidates_columns.values()
    assert artefacts == [info.artefact for info in whole]


@pytest.mark.heavy
def test_build_resumes_after_sigkill_with_the_same_bits(cluster, tmp_path):
    """Kills a build with SIGKILL after its first commits. The next build takes over the lease."""
    uri, whole = tmp_path / "index", tmp_path / "whole"
    add_items(uri, tmp_path / "vectors", NUM_ITEMS, 0, "i", fragment_items=4)
    shutil.copytree(uri, whole)
    arguments = ["ivf", "generator.num_centroids=64", "commit_fragments=1"]
    # In the same way, since the last bits of a fit depend on the number of threads.
    process = start_job("jobs.add", "candidates", str(whole), *arguments, address=cluster)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    process = start_job("jobs.add", "candidates", str(uri), *arguments, address=cluster)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        stored = lance.dataset(f"{uri}/{ITEMS}")
        if COLUMN in stored.schema.names and stored.count_rows(f"`{COLUMN}` IS NOT NULL"):
            process.kill()
            break
        time.sleep(0.01)
    _, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, error
    assert 0 < sum(code is not None for code in codes(uri, COLUMN).values()) < NUM_ITEMS
    options = {"k": 5, "candidates": "ivf", "num_candidates": 60}
    assert all(len(r.item_ids) == 5 for r in open_index(str(uri)).rank(queries(), **options))

    progress = build(uri, IVF)
    assert progress.done_before > 0 and progress.done > 0
    assert codes(uri, COLUMN) == codes(whole, COLUMN)
    (resumed,), (expected,) = (
        IndexReader(str(path)).candidates_columns.values() for path in (uri, whole)
    )
    assert resumed == expected


@pytest.mark.heavy
def test_readers_search_while_a_generator_is_refitted(uri):
    """A reader uses the former fit or the new one, never a part of either."""
    build(uri, IVF)
    options = {"k": 10, "candidates": "ivf", "num_candidates": 30}
    exact = open_index(str(uri)).rank(queries(), k=NUM_ITEMS)
    scores = [ranking.scores_by_item() for ranking in exact]
    former = open_index(str(uri))  # opens the vectors after they were dropped
    before = [r.scores_by_item() for r in open_index(str(uri)).rank(queries(), **options)]
    found, is_done = [], threading.Event()

    def search() -> None:
        while not is_done.is_set():
            rankings = open_index(str(uri)).rank(queries(), **options)
            found.append([ranking.scores_by_item() for ranking in rankings])

    with ThreadPoolExecutor(1) as executor:
        searching = executor.submit(search)
        build(uri, {**IVF, "num_centroids": 16}, refit=True)
        is_done.set()
        searching.result()
    after = [r.scores_by_item() for r in open_index(str(uri)).rank(queries(), **options)]
    assert before != after
    assert found and all(result in (before, after) for result in found)
    assert [r.scores_by_item() for r in former.rank(queries(), **options)] == before
    for result, expected in zip(after, scores, strict=True):
        assert result.items() <= expected.items()


@pytest.mark.heavy
def test_interrupted_refit_keeps_its_settings(uri, monkeypatch):
    build(uri, IVF)

    def stop(session: Session) -> None:
        raise Stopped("stopped by the test")

    changed = {**IVF, "num_centroids": 32}
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Session, "check", stop)
        build(uri, changed, refit=True)
    assert len(IndexReader(str(uri)).candidates_columns) == 2
    with pytest.raises(SpecError, match=r"differs from that of the interrupted refit"):
        build(uri, {**IVF, "num_centroids": 16}, refit=True)
    build(uri, changed, refit=True)
    (info,) = IndexReader(str(uri)).candidates_columns.values()
    assert info.generator["num_centroids"] == 32


@pytest.mark.heavy
def test_other_jobs_keep_the_codes(uri, tmp_path):
    build(uri, IVF)
    stored, options = codes(uri, COLUMN), {"candidates": "ivf", "num_candidates": 20}
    before = [r.scores_by_item() for r in open_index(str(uri)).rank(queries(), "full", **options)]
    compressor = {"name": "hpool", "num_vectors": 2}
    given = {"index": str(uri), "representations": [{"compressor": compressor}]}
    add_job.run(
        recompress.Recompression(
            config.parse(recompress.RecompressSpec, given), recompress.RecompressResources()
        ),
        job="3",
        report=lambda line: None,
    )
    export.main([str(uri), str(tmp_path / "out.parquet"), "--representation", "full"])
    assert codes(uri, COLUMN) == stored
    after = open_index(str(uri)).rank(queries(), "full", **options)
    assert [r.scores_by_item() for r in after] == before
    with pytest.raises(SpecError, match=r"which was not built for hpool_2"):
        open_index(str(uri)).rank(queries(1), "hpool_2", candidates="ivf")
    build(uri, IVF, representation="hpool_2")
    assert codes(uri, COLUMN) == stored


@pytest.mark.heavy
def test_refuses_a_generator_of_replaced_vectors(uri, tmp_path):
    """A representation that was dropped and added with other settings needs another fit."""

    def add(num_vectors: int) -> None:
        compressor = {"name": "hpool", "num_vectors": num_vectors}
        given = {"index": str(uri), "representations": [{"compressor": compressor, "id": "few"}]}
        add_job.run(
            recompress.Recompression(
                config.parse(recompress.RecompressSpec, given), recompress.RecompressResources()
            ),
            job="3",
            report=lambda line: None,
        )

    add(2)
    build(uri, IVF, representation="few")
    dataset = lance.dataset(f"{uri}/{ITEMS}")
    info = IndexReader(str(uri)).representation("few")
    dataset.drop_columns([c for c in ("few", info.assignment_column) if c in dataset.schema.names])
    add(4)
    with pytest.raises(
        SpecError, match=r"^candidates must be one of exact, got 'ivf', which was fitted to other"
    ):
        open_index(str(uri)).rank(queries(1), "few", candidates="ivf")
    with pytest.raises(SpecError, match=r"^generator must be .* fit it again with --refit"):
        build(uri, IVF, representation="few")
    build(uri, IVF, refit=True, representation="few")
    exact = open_index(str(uri)).rank(queries(), "few", k=5)
    options = {"k": 5, "candidates": "ivf", "num_candidates": 120}
    found = open_index(str(uri)).rank(queries(), "few", **options)
    assert np.mean([a.scores == b.scores for a, b in zip(found, exact, strict=True)]) > 0.7


@pytest.mark.heavy
def test_refit_replaces_the_former_fit_when_it_is_complete(uri, monkeypatch):
    build(uri, IVF)
    check = Session.check

    def stop_after_one_commit(session: Session) -> None:
        check(session)
        if session._summary()["commits"] == 1:
            raise Stopped("stopped by the test")

    changed = {**IVF, "num_centroids": 32}
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Session, "check", stop_after_one_commit)
        build(uri, changed, refit=True)
    index = IndexReader(str(uri))
    assert set(index.candidates_columns) == {COLUMN, "full_ivf_2_candidates"}
    info = index.representation("full")
    assert generators(index, info)["ivf"] == COLUMN
    build(uri, changed)
    index = IndexReader(str(uri))
    assert generators(index, info)["ivf"] == "full_ivf_2_candidates"
    (stored,) = index.candidates_columns.values()
    assert (stored.revision, stored.generator["num_centroids"]) == (2, 32)
    with pytest.raises(SpecError, match=r"differs from the stored generator"):
        build(uri, IVF)


def test_drop(uri):
    build(uri, IVF)
    candidates_job.drop(spec(uri, IVF), job="3", report=lambda line: None)
    assert not IndexReader(str(uri)).candidates_columns
    with pytest.raises(SpecError, match=r"^candidates must be one of exact, got 'ivf', which was"):
        open_index(str(uri)).rank(queries(1), candidates="ivf")
    with pytest.raises(SpecError, match=r"^generator must be a generator of the index"):
        candidates_job.drop(spec(uri, IVF), job="3", report=lambda line: None)


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("group_by", [None, "parent"])
def test_filtered_search_returns_k_items(built, group_by, is_small, monkeypatch):
    """Small selections are searched exactly. In others, the generator selects among the items."""
    if not is_small:
        monkeypatch.setattr("pipeline.search.score.EXACT_ITEMS", 0)
    searcher = open_index(str(built))
    options = {"k": 5, "group_by": group_by}
    generated = {"candidates": "ivf", "num_candidates": 5, **options}
    ids = [f"i{i:03}" for i in range(0, NUM_ITEMS, 5)]
    for selection in (
        {"ids": ids},
        {"parents": ids[::2]},
        {"filter": "item_id < 'i020'"},
        {"filter": "item_id >= 'i100'", "ids": ids},
        {"filter": "item_id < 'i003'"},  # fewer than k items
        {"filter": "item_id = 'nothing'"},
    ):
        exact = searcher.rank(queries(), **selection, **options)
        everything = searcher.rank(queries(), **selection, **{**options, "k": NUM_ITEMS})
        found = searcher.rank(queries(), **selection, **generated)
        for ranking, reference, scores in zip(found, exact, everything, strict=True):
            assert len(ranking.item_ids) == len(reference.item_ids)
            assert ranking.scores_by_item().items() <= scores.scores_by_item().items()
            if is_small:
                assert ranking.item_ids == reference.item_ids


def test_sharded_search_equals_the_merged_search_of_its_shards(built):
    """Each shard has as many candidates as the whole index, so that no better item is missed."""
    uri = str(built)
    options = {"k": 10, "candidates": "ivf", "num_candidates": 20}
    shards = [open_index(uri, shard=(i, 2)).rank(queries(), **options) for i in range(2)]
    merged = [merge_rankings(parts, SearchOptions(k=10)) for parts in zip(*shards, strict=True)]
    exact = open_index(uri).rank(queries(), k=10)
    whole = open_index(uri).rank(queries(), **options)
    with ShardedSearcher(uri, num_shards=2, num_cpus=0.5) as searcher:
        sharded = searcher.rank(queries(), **options)
        all_items = searcher.rank(queries(), **{**options, "num_candidates": NUM_ITEMS})
    assert [r.scores_by_item() for r in sharded] == [r.scores_by_item() for r in merged]
    assert [r.scores_by_item() for r in all_items] == [r.scores_by_item() for r in exact]
    for ranking, other in zip(sharded, whole, strict=True):
        assert (np.asarray(ranking.scores) >= np.asarray(other.scores) - 1e-6).all()


def test_columns_of_former_generators_are_not_used(built):
    index = IndexReader(str(built))
    info, stored = index.representation("full"), index.candidates_columns
    stored[COLUMN] = dataclasses.replace(stored[COLUMN], generator={"name": "lemur"})
    assert generators(index, info) == {}
    message = r"^candidates must be one of exact, got 'lemur', which was not built for full"
    with pytest.raises(SpecError, match=message):
        generator_columns(index, info, "lemur")


class Other(Ivf):
    """Generator that searches do not know."""

    class Spec(ComponentSpec):
        pass


def test_invalid_specs(uri):
    with pytest.raises(SpecError, match=r"^generator\.name must be one of .*ivf"):
        spec(uri, {"name": "ivv"})
    with pytest.raises(
        SpecError, match=r"^generator\.name must be ivf or bm25, got 'test.*:Other'"
    ):
        build(uri, {"class": f"{__name__}:Other"})
    with pytest.raises(SpecError, match=r"^representation must be 'full'"):
        build(uri, IVF, representation="hpool_4")
