"""BM25 candidates, unions and fused search on real indexes, against literal references."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import config
from pipeline.config import SpecError, Stopped
from pipeline.index import add as add_job
from pipeline.index import job as index_job
from pipeline.index.add import Progress
from pipeline.index.reader import ITEMS, IndexReader
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.search import candidates_job
from pipeline.search.candidates_job import CandidatesJobSpec, CandidatesResources
from pipeline.search.fusion import Fusion, FusionWeights
from pipeline.search.query import Queries
from pipeline.search.score import Ranking
from pipeline.search.searcher import open_index
from pipeline.search.sharded import ShardedSearcher

pytestmark = pytest.mark.usefixtures("cluster")

DIM, NUM_ITEMS = 16, 120
#: Words that the stemmer does not change. The last ones occur in added items only.
WORDS = [f"w{chr(97 + i)}{chr(97 + j)}x" for i in range(6) for j in range(6)]
NEW_WORDS = ["zebrax", "quaggax"]
COLUMN = "text_bm25_1_candidates"


class Item:
    """Vectors and text of an item, or None for an item without a text."""

    def __init__(self, item_id: str, rng: np.random.Generator, words: list[str]):
        self.item_id, self.parent_id = item_id, f"p{rng.integers(20)}"
        self.vectors = rng.normal(size=(rng.integers(1, 5), DIM)).astype(np.float32)
        self.vectors /= np.linalg.norm(self.vectors, axis=1, keepdims=True)
        chosen = rng.choice(words, rng.integers(3, 12), p=weights(len(words)))
        self.text = " ".join(chosen) if rng.random() > 0.1 else None


def weights(number: int) -> np.ndarray:
    """Returns the frequencies of words, which follow Zipf's law."""
    values = 1 / np.arange(1, number + 1)
    return values / values.sum()


def items(num: int, seed: int, prefix: str, words: list[str] = WORDS) -> list[Item]:
    rng = np.random.default_rng(seed)
    return [Item(f"{prefix}{i:03}", rng, words) for i in range(num)]


def add(uri: Path, folder: Path, added: list[Item]) -> None:
    """Indexes items in fragments of 40."""
    folder.mkdir(exist_ok=True)
    columns = {
        "id": [item.item_id for item in added],
        "parent_id": [item.parent_id for item in added],
        "text": pa.array([item.text for item in added], pa.string()),
        "vectors": [item.vectors.tolist() for item in added],
    }
    pq.write_table(pa.table(columns), folder / "items.parquet")
    given = {
        "index": str(uri),
        "source": {"name": "vectors", "path": str(folder / "items.parquet"), "dim": DIM},
        "encoder": {"name": "precomputed", "dim": DIM, "label": "test"},
        "representations": [{"compressor": "none", "codec": "float32"}],
        "unit_items": 40,
        "fragment_items": 40,
    }
    spec = config.parse(IndexSpec, given)
    index_job.run(spec, IndexResources(), job="index", report=lambda line: None)


@pytest.fixture(scope="module")
def original(cluster, tmp_path_factory) -> Path:
    """Index of 120 items in 3 fragments."""
    folder = tmp_path_factory.mktemp("lexical")
    add(folder / "index", folder / "source", items(NUM_ITEMS, 0, "i"))
    return folder / "index"


@pytest.fixture(scope="module")
def built(original, tmp_path_factory) -> Path:
    """The same index with BM25. Tests do not change it."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(original, folder / "index")
    build(folder / "index")
    return folder / "index"


@pytest.fixture
def uri(built, tmp_path) -> Path:
    """Copy of the index with BM25 that the test may change."""
    shutil.copytree(built, tmp_path / "index")
    return tmp_path / "index"


def spec(uri: Path, **fields: Any) -> CandidatesJobSpec:
    given = {"index": str(uri), "generator": {"name": "bm25"}, "commit_fragments": 1, **fields}
    return config.parse(CandidatesJobSpec, given)


def build(uri: Path, refit: bool = False, **fields: Any) -> Progress:
    """Runs the job without printing."""
    return add_job.run(
        candidates_job.Candidates(spec(uri, **fields), CandidatesResources(), refit=refit),
        job="2",
        report=lambda line: None,
    )


def codes(uri: Path, column: str = COLUMN) -> dict[str, Any]:
    """Returns the stored codes by item id."""
    table = lance.dataset(f"{uri}/{ITEMS}").to_table(columns=["item_id", column])
    return dict(zip(table["item_id"].to_pylist(), table[column].to_pylist(), strict=True))


def queries(num: int = 8, words: list[str] = WORDS) -> Queries:
    """Returns queries of 3 token vectors and 3 words."""
    rng = np.random.default_rng(7)
    tokens = rng.normal(size=(num, 3, DIM)).astype(np.float32)
    tokens /= np.linalg.norm(tokens, axis=2, keepdims=True)
    texts = [" ".join(rng.choice(words, 3)) for _ in range(num)]
    return Queries(list(torch.from_numpy(tokens)), None, [["#"] * 3] * num, texts)


def bm25(searched: list[Item], fitted: list[Item], query: str) -> np.ndarray:
    """Returns BM25 scores in float64 with the statistics of other items."""
    counts = [Counter((item.text or "").split()) for item in fitted]
    lengths = [counted.total() for counted in counts if counted]
    mean = sum(lengths) / len(lengths)
    scores = np.zeros(len(searched))
    for word in query.split():
        df = sum(word in counted for counted in counts)
        idf = math.log(1 + (len(lengths) - df + 0.5) / (df + 0.5))
        for i, item in enumerate(searched):
            counted = Counter((item.text or "").split())
            norm = 1.2 * (0.25 + 0.75 * counted.total() / mean)
            scores[i] += idf * counted[word] / (counted[word] + norm)
    return scores


def maxsim(searched: list[Item], tokens: torch.Tensor) -> np.ndarray:
    return np.array([(tokens.numpy() @ item.vectors.T).max(1).sum() for item in searched])


def fused(
    searched: list[Item], fitted: list[Item], number: int, fusion: Fusion, words: list[str] = WORDS
) -> dict[str, float]:
    """Returns the fused scores of all items by their literal definition, without grouping."""
    asked = queries(words=words)
    components = {
        "maxsim": maxsim(searched, asked.tokens[number]),
        "bm25": bm25(searched, fitted, asked.texts[number]),
    }
    totals: dict[str, float] = {}
    for name, scores in components.items():
        listed = [i for i in np.argsort(-scores, kind="stable") if name != "bm25" or scores[i] > 0]
        listed = listed[: fusion.depth]
        lowest = 0 if name == "bm25" else scores[listed].min()
        for i in listed:
            share = (scores[i] - lowest) / (scores[listed[0]] - lowest)
            weight = getattr(fusion.weights, name)
            item_id = searched[i].item_id
            totals[item_id] = totals.get(item_id, 0.0) + weight * share
    return totals


def assert_fused(ranking: Ranking, expected: dict[str, float]) -> None:
    """Compares a ranking with fused scores, whose ties may have another order."""
    best = sorted(expected.values(), reverse=True)[: len(ranking.scores)]
    assert ranking.scores == pytest.approx(best, rel=1e-4)
    found = [expected[item_id] for item_id in ranking.item_ids]
    assert found == pytest.approx(best, rel=1e-4)


#: All items match, so that no ties occur at the end of a list.
FUSION = Fusion(weights=FusionWeights(bm25=0.4), agreement=0, depth=1000)


def test_candidates_are_the_best_texts(built):
    searched = items(NUM_ITEMS, 0, "i")
    options = {"k": 5, "candidates": "bm25", "num_candidates": 12}
    for number, ranking in enumerate(open_index(str(built)).rank(queries(), **options)):
        scores = bm25(searched, searched, queries().texts[number])
        limit = sorted(scores, reverse=True)[11] - 1e-6
        chosen = [i for i, score in enumerate(scores) if score >= max(limit, 1e-9)]
        exact = maxsim(searched, queries().tokens[number])
        best = sorted(chosen, key=lambda i: -exact[i])[:5]
        assert ranking.item_ids == [searched[i].item_id for i in best]
        assert ranking.scores == pytest.approx(exact[best].tolist(), rel=1e-5)


def test_union_contains_the_candidates_of_both(uri):
    add_job.run(
        candidates_job.Candidates(
            spec(uri, generator={"name": "ivf", "num_centroids": 64}), CandidatesResources()
        ),
        job="3",
        report=lambda line: None,
    )
    searcher = open_index(str(uri))
    options = {"k": 10, "num_candidates": 10}
    names = ("bm25", "ivf", "bm25+ivf")
    found = {n: searcher.rank(queries(), candidates=n, **options) for n in names}
    for number in range(8):
        first, second, both = (found[name][number].scores_by_item() for name in names)
        union = {**first, **second}
        expected = sorted(union, key=lambda item_id: -union[item_id])[:10]
        assert list(both) == expected


def test_unknown_parts_of_unions(built):
    searcher = open_index(str(built))
    for name, message in (
        ("bm25+ivf", r"joined by \+, got 'bm25\+ivf', which contains 'ivf'"),
        ("bm25+", r"got 'bm25\+', which contains ''"),
        ("exact+bm25", r"which contains 'exact', which was not built"),
        ("bm25+bm25", r"different generators, got 'bm25\+bm25', which repeats a generator"),
    ):
        with pytest.raises(SpecError, match=rf"^candidates must be {message}|{message}"):
            searcher.rank(queries(), candidates=name)


def test_fused_scores_equal_their_definition(built):
    searched = items(NUM_ITEMS, 0, "i")
    rankings = open_index(str(built)).rank(queries(), k=10, score="fused", fusion=FUSION)
    for number, ranking in enumerate(rankings):
        assert_fused(ranking, fused(searched, searched, number, FUSION))
        by_id = {item.item_id: i for i, item in enumerate(searched)}
        rows = [by_id[item_id] for item_id in ranking.item_ids]
        texts = bm25(searched, searched, queries().texts[number])
        assert ranking.bm25 == pytest.approx(texts[rows], rel=1e-5, abs=1e-6)
        exact = maxsim(searched, queries().tokens[number])
        assert ranking.maxsim == pytest.approx(exact[rows], rel=1e-5)


@pytest.mark.parametrize(
    ("filter", "group_by"),
    [
        (None, "parent"),
        pytest.param("item_id < 'i060'", None, marks=pytest.mark.heavy),
        pytest.param(None, None, marks=pytest.mark.heavy),
        pytest.param("item_id < 'i060'", "parent", marks=pytest.mark.heavy),
        pytest.param("item_id = 'i003'", None, marks=pytest.mark.heavy),
        pytest.param("item_id = 'i003'", "parent", marks=pytest.mark.heavy),
    ],
)
def test_shards_fuse_like_the_whole(built, group_by, filter):
    options = {"k": 7, "group_by": group_by, "filter": filter, "score": "fused"}
    options["fusion"] = Fusion(weights=FusionWeights(), depth=10)
    whole = open_index(str(built)).rank(queries(), **options)
    with ShardedSearcher(str(built), num_shards=3, num_cpus=0.5) as searcher:
        sharded = searcher.rank(queries(), **options)
        hits = searcher.search(queries(), **options)
    for ranking, other, described in zip(sharded, whole, hits, strict=True):
        assert ranking.item_ids == other.item_ids == [hit.item_id for hit in described]
        assert ranking.scores == other.scores
        assert [hit.parts.bm25 for hit in described] == other.bm25.tolist()
        assert [hit.parts.maxsim for hit in described] == other.maxsim.tolist()
        assert all(hit.matches for hit in described)
        if group_by:
            assert len(set(ranking.parent_ids)) == len(ranking.parent_ids)
        if filter == "item_id < 'i060'":
            assert all(item_id < "i060" for item_id in ranking.item_ids)


def test_fused_search_with_candidates(built):
    searched = items(NUM_ITEMS, 0, "i")
    options = {"k": 5, "score": "fused", "fusion": FUSION}
    exact = open_index(str(built)).rank(queries(), **options)
    options |= {"candidates": "bm25", "num_candidates": 80}
    found = open_index(str(built)).rank(queries(), **options)
    for number, (ranking, reference) in enumerate(zip(found, exact, strict=True)):
        scores = bm25(searched, searched, queries().texts[number])
        texts = {item.item_id: s for item, s in zip(searched, scores, strict=True)}
        assert all(texts[item_id] > 0 for item_id in ranking.item_ids)
        assert set(ranking.item_ids) & set(reference.item_ids)


@pytest.mark.heavy
def test_fused_search_among_candidates_of_vectors(uri):
    """The generator of vectors and the components are independent."""
    add_job.run(
        candidates_job.Candidates(
            spec(uri, generator={"name": "ivf", "num_centroids": 64}), CandidatesResources()
        ),
        job="3",
        report=lambda line: None,
    )
    searcher = open_index(str(uri))
    options = {"k": 5, "score": "fused", "fusion": FUSION, "num_candidates": 110}
    exact = searcher.rank(queries(), k=5, score="fused", fusion=FUSION)
    shares = []
    for candidates in ("ivf", "ivf+bm25"):
        found = searcher.rank(queries(), candidates=candidates, **options)
        shares += [
            len(set(ranking.item_ids) & set(reference.item_ids)) / 5
            for ranking, reference in zip(found, exact, strict=True)
        ]
    assert np.mean(shares) > 0.8


def test_items_without_vectors_are_no_candidates(uri):
    """They would replace items with a score."""
    lance.dataset(f"{uri}/{ITEMS}").update({"full_float32": "NULL"}, "item_id < 'i060'")
    options = {"k": 5, "candidates": "bm25", "num_candidates": 5}
    for ranking in open_index(str(uri)).rank(queries(), **options):
        assert len(ranking.item_ids) == 5
        assert all(item_id >= "i060" for item_id in ranking.item_ids)


def test_fewer_matches_than_hits_fall_back_to_all_items(built):
    asked = queries(2, ["nothing"])
    searcher = open_index(str(built))
    options = {"k": 5, "num_candidates": 20}
    found = searcher.rank(asked, candidates="bm25", **options)
    assert [r.item_ids for r in found] == [r.item_ids for r in searcher.rank(asked, **options)]
    (ranking,) = searcher.rank(queries(1, ["nothing"]), k=5, score="fused", fusion=FUSION)
    assert ranking.item_ids == searcher.rank(queries(1), k=5)[0].item_ids


def test_filtered_candidates(built):
    ids = [f"i{i:03}" for i in range(0, NUM_ITEMS, 3)]
    options = {"k": 5, "ids": ids, "candidates": "bm25", "num_candidates": 6}
    for ranking in open_index(str(built)).rank(queries(), **options):
        assert len(ranking.item_ids) == 5
        assert set(ranking.item_ids) <= set(ids)


@pytest.mark.heavy
def test_added_items_are_scored_before_and_after_they_have_codes(uri, tmp_path):
    """The statistics are those of the fit until a refit."""
    words = [*NEW_WORDS, *WORDS]
    fitted, new = items(NUM_ITEMS, 0, "i"), items(50, 1, "n", words)
    before = codes(uri)
    add(uri, tmp_path / "new", new)
    assert all(codes(uri)[item.item_id] is None for item in new)
    asked = queries(words=words)
    options = {"k": 12, "score": "fused", "fusion": FUSION}
    first = open_index(str(uri)).rank(asked, **options)
    for number, ranking in enumerate(first):
        assert_fused(ranking, fused([*fitted, *new], fitted, number, FUSION, words))
    assert any(item_id[0] == "n" for ranking in first for item_id in ranking.item_ids)

    assert build(uri).rows == sum(item.text is not None for item in new)
    after = codes(uri)
    assert {item: after[item] for item in before} == before
    assert sum(code is not None for code in after.values()) == sum(
        item.text is not None for item in [*fitted, *new]
    )
    second = open_index(str(uri)).rank(asked, **options)
    assert [r.item_ids for r in second] == [r.item_ids for r in first]
    assert [r.scores for r in second] == [r.scores for r in first]
    assert build(uri).done == 0

    build(uri, refit=True)
    index = IndexReader(str(uri))
    assert list(index.candidates_columns) == ["text_bm25_2_candidates"]
    for number, ranking in enumerate(open_index(str(uri)).rank(asked, **options)):
        everything = [*fitted, *new]
        assert_fused(ranking, fused(everything, everything, number, FUSION, words))


def test_removed_items_disappear(uri):
    fitted = items(NUM_ITEMS, 0, "i")
    options = {"k": 5, "score": "fused", "fusion": FUSION}
    (first, *_) = open_index(str(uri)).rank(queries(), **options)
    lance.dataset(f"{uri}/{ITEMS}").delete(f"item_id = '{first.item_ids[0]}'")
    remaining = [item for item in fitted if item.item_id != first.item_ids[0]]
    for number, ranking in enumerate(open_index(str(uri)).rank(queries(), **options)):
        assert_fused(ranking, fused(remaining, fitted, number, FUSION))


@pytest.mark.heavy
def test_interrupted_build_resumes_with_the_same_codes(original, built, tmp_path, monkeypatch):
    uri = tmp_path / "index"
    shutil.copytree(original, uri)
    check = Session.check

    def stop_after_one_commit(session: Session) -> None:
        check(session)
        if session._summary()["commits"] == 1:
            raise Stopped("stopped by the test")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Session, "check", stop_after_one_commit)
        build(uri)
    assert 0 < sum(code is not None for code in codes(uri).values()) < NUM_ITEMS - 20
    options = {"k": 8, "score": "fused", "fusion": FUSION}
    expected = open_index(str(built)).rank(queries(), **options)
    partial = open_index(str(uri)).rank(queries(), **options)
    assert [r.scores for r in partial] == [r.scores for r in expected]
    progress = build(uri)
    assert progress.done_before + progress.done == 3
    assert progress.done_before > 0
    assert codes(uri) == codes(built)


def test_drop(uri):
    candidates_job.drop(spec(uri), job="3", report=lambda line: None)
    assert not IndexReader(str(uri)).candidates_columns
    searcher = open_index(str(uri))
    with pytest.raises(SpecError, match=r"^candidates must be one of exact, got 'bm25', which was"):
        searcher.rank(queries(), candidates="bm25")
    with pytest.raises(SpecError, match=r"^score must be maxsim, got 'fused', which needs bm25, "):
        searcher.rank(queries(), score="fused", fusion=FUSION)


def test_queries_without_texts(built):
    searcher = open_index(str(built))
    vectors = [np.ones((2, DIM), np.float32)]
    with pytest.raises(SpecError, match=r"^score must be maxsim.*needs the text of the query"):
        searcher.rank(vectors, score="fused", fusion=FUSION)
    with pytest.raises(SpecError, match=r"^candidates must be exact.*needs the text of the query"):
        searcher.rank(vectors, candidates="bm25")
    with pytest.raises(SpecError, match=r"^score must be maxsim.*needs single vectors"):
        weights = FusionWeights(single_vector=1)
        searcher.rank(queries(), score="fused", fusion=Fusion(weights=weights))


def test_invalid_jobs(original, tmp_path):
    with pytest.raises(SpecError, match=r"^queries must be omitted for bm25"):
        build(original, queries=str(original))
    without = items(5, 0, "i")
    for item in without:
        item.text = None
    add(tmp_path / "index", tmp_path / "source", without)
    with pytest.raises(SpecError, match=r"generator must be used with an index whose items have"):
        build(tmp_path / "index")
    assert not IndexReader(str(tmp_path / "index")).candidates_columns
