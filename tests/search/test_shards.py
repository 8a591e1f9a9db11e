"""Shards of an index, in one process and in Ray actors, give the results of the whole index."""

from __future__ import annotations

import os
import signal
from itertools import chain

import numpy as np
import pytest

from pipeline.config import JobError, SpecError
from pipeline.index.reader import IndexReader
from pipeline.search.options import SearchOptions
from pipeline.search.searcher import open_index
from pipeline.search.shards import merge_rankings
from tests.search.vectors import DIM, rows, unit, write

#: Parents have items in several fragments, and ids are not in storage order.
NAMES = [f"p{i % 4}/item{(i * 7) % 20:02}" for i in range(20)]
LENGTHS = [3, 0, None, 1, 7, *range(1, 16)]
QUERIES = list(unit((4, 3, DIM), seed=9).astype(np.float32))


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """Returns an index of twenty items in seven fragments, and copies of some of its vectors."""
    uri = str(tmp_path_factory.mktemp("shards") / "index")
    table = rows(NAMES, LENGTHS)
    write(uri, table, max_rows_per_file=3)
    for i, name in ((4, "p0/a"), (4, "p9/z"), (7, "p1/b")):
        copy = rows([name], [1]).drop_columns(["full"])
        write(uri, copy.append_column("full", table["full"].slice(i, 1)), mode="append")
    return uri


def merged(uri: str, number: int, k: int, group_by: str | None = None, **options):
    shards = [open_index(uri, shard=(i, number)) for i in range(number)]
    rankings = [shard.rank(QUERIES, k=k, group_by=group_by, **options) for shard in shards]
    return [
        merge_rankings(parts, SearchOptions(k=k, group_by=group_by))
        for parts in zip(*rankings, strict=True)
    ]


@pytest.mark.parametrize("number", [1, 2, 3, 10, 40])
def test_shards_are_runs_of_all_fragments(uri, number):
    index = IndexReader(uri)
    fragments = [f.fragment_id for f in index.fragments()]
    parts = [[f.fragment_id for f in index.fragments((i, number))] for i in range(number)]
    assert list(chain.from_iterable(parts)) == fragments
    sizes = [sum(f.count_rows() for f in index.fragments((i, number))) for i in range(number)]
    assert sum(sizes) == len(index)
    assert max(sizes) <= len(index) / number + 3  # at most one fragment above the mean


@pytest.mark.parametrize("number", [1, 2, 3, 40])
@pytest.mark.parametrize("k", [1, 3, 5, 100])
@pytest.mark.parametrize("group_by", [None, "parent"])
@pytest.mark.parametrize("filter", [None, "item_id > 'p1'", "item_id = 'nothing'"])
def test_merged_shards_equal_the_whole(uri, number, k, group_by, filter):
    expected = open_index(uri).rank(QUERIES, k=k, group_by=group_by, filter=filter)
    for ranking, other in zip(
        merged(uri, number, k, group_by, filter=filter), expected, strict=True
    ):
        assert ranking.item_ids == other.item_ids
        assert ranking.parent_ids == other.parent_ids
        assert ranking.scores == pytest.approx(other.scores, abs=1e-6)


def test_ties_across_shards_are_sorted_by_id(uri):
    for ranking in merged(uri, 3, 100):
        score = dict(zip(ranking.item_ids, ranking.scores, strict=True))
        assert score["p0/a"] == score["p9/z"] == score[NAMES[4]]
        first = ranking.item_ids.index("p0/a")
        assert ranking.item_ids[first : first + 3] == ["p0/a", NAMES[4], "p9/z"]


@pytest.mark.parametrize("shard", [(0, 0), (2, 2), (-1, 2)])
def test_rejects_invalid_shard(uri, shard):
    with pytest.raises(SpecError, match="^shard must be .*n >= 1 and 0 <= i < n") as caught:
        open_index(uri, shard=shard)
    assert caught.value.value == shard


# -- in Ray actors ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(cluster, index_uri):
    from pipeline.search.sharded import ShardedSearcher

    with ShardedSearcher(index_uri, num_shards=2, num_cpus=0.1) as searcher:
        yield searcher


@pytest.mark.parametrize("score", ["maxsim", "single_vector", "hybrid"])
def test_actors_equal_one_searcher(sharded, index_uri, score):
    whole = open_index(index_uri)
    sharded.load("hpool_4", score)
    texts = ["the lift of a wing", "how to bake bread"]
    for options in (
        {"k": 3},
        {"k": 100},
        {"k": 3, "group_by": "parent"},
        {"k": 5, "filter": "parent_id <> 'bread'"},
        {"k": 5, "filter": "item_id = 'nothing'", "group_by": "parent"},
    ):
        expected = whole.search(texts, "hpool_4", score=score, **options)
        hits = sharded.search(texts, "hpool_4", score=score, **options)
        for shard_hits, single_hits in zip(hits, expected, strict=True):
            assert [hit.item_id for hit in shard_hits] == [hit.item_id for hit in single_hits]
            assert [h.score for h in shard_hits] == pytest.approx(
                [h.score for h in single_hits], abs=1e-5
            )
            for hit, other in zip(shard_hits, single_hits, strict=True):
                assert (hit.rank, hit.title, hit.text) == (other.rank, other.title, other.text)
                assert [m.document_token for m in hit.matches] == [
                    m.document_token for m in other.matches
                ]
                assert [m.spans for m in hit.matches] == [m.spans for m in other.matches]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"k": 0}, "k"), ({"filter": "colour = 'red'"}, "filter"), ({"score": "best"}, "score")],
)
def test_rejects_invalid_arguments(sharded, options, field, monkeypatch):
    """No actor is called, because Ray would print the errors of all actors but the first."""
    monkeypatch.setattr(sharded.scorer, "_open_actors", lambda: pytest.fail("an actor was called"))
    with pytest.raises(SpecError, match=f"^{field} must be ") as caught:
        sharded.search("lift", **options)
    assert caught.value.value == options[field]


@pytest.mark.heavy
def test_more_shards_than_fragments_and_empty_index(cluster, index_uri, tmp_path):
    from pipeline.search.sharded import ShardedSearcher

    with ShardedSearcher(index_uri, num_shards=9, num_cpus=0.1) as searcher:
        assert len(searcher.scorer._actors) == 2
        for group_by in (None, "parent"):
            (ranking,) = searcher.rank(["lift"], k=100, group_by=group_by)
            (other,) = open_index(index_uri).rank(["lift"], k=100, group_by=group_by)
            assert ranking.item_ids == other.item_ids
            assert ranking.rows.tolist() == other.rows.tolist()
    empty = str(tmp_path / "empty")
    write(empty, rows(["a"], [1]).slice(0, 0))
    with ShardedSearcher(empty, num_shards=2, num_cpus=0.1) as searcher:
        assert [r.item_ids for r in searcher.rank(QUERIES)] == [[]] * len(QUERIES)
        with pytest.raises(SpecError, match="^k must be greater than or equal to 1, got 0$"):
            searcher.rank(QUERIES, k=0)
    with pytest.raises(JobError, match="^the shards of .* are closed$"):
        searcher.rank(QUERIES)


def test_dead_actor_is_restarted(cluster, uri):
    import ray

    from pipeline.search.sharded import ShardedSearcher

    @ray.remote(num_cpus=0)
    def kill(process: int) -> None:
        os.kill(process, signal.SIGKILL)

    def processes(searcher) -> list[int]:
        return ray.get(
            [a.__ray_call__.remote(lambda _: os.getpid()) for a in searcher.scorer._actors]
        )

    expected = [r.item_ids for r in open_index(uri).rank(QUERIES)]
    with ShardedSearcher(uri, num_shards=2, num_cpus=0.1, max_restarts=1) as searcher:
        assert [r.item_ids for r in searcher.rank(QUERIES)] == expected
        before = processes(searcher)
        ray.get(kill.remote(before[1]))
        assert [r.item_ids for r in searcher.rank(QUERIES)] == expected
        after = processes(searcher)
        assert after[0] == before[0] and after[1] != before[1]
        ray.get(kill.remote(after[1]))
        with pytest.raises(JobError, match="a shard of .* failed permanently"):
            for _ in range(20):
                searcher.rank(QUERIES)


def test_actors_without_resources(cluster, uri):
    from pipeline.search.sharded import ShardedSearcher

    resources = "2 actors with 0 CPUs and 5 GPUs each"
    with pytest.raises(JobError, match=f"did not start in 3 s; they require {resources}$"):
        ShardedSearcher(uri, num_shards=2, num_cpus=0, num_gpus=5, start_timeout_s=3)


def test_rejects_invalid_number_of_shards(cluster, uri):
    from pipeline.search.sharded import ShardedSearcher

    with pytest.raises(SpecError, match="^num_shards must be an integer >= 1, got 0$"):
        ShardedSearcher(uri, num_shards=0)
