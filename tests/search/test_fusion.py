"""Fusion of rankings against a literal implementation, on random scores and over shards."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import SpecError, parse
from pipeline.index.reader import IndexReader
from pipeline.search.fusion import DEFAULT_FUSION, Fusion, FusionWeights, pool_rows
from pipeline.search.options import SearchOptions
from pipeline.search.score import Ranking, fuse
from pipeline.search.shards import merge_rankings

NAMES = ("maxsim", "bm25", "single_vector")
AGREEMENTS = pytest.mark.parametrize("agreement", [0, 1, 3])
SETTINGS = {"weights": FusionWeights(maxsim=1, bm25=0.5, single_vector=0.25), "depth": 6}


def random_scores(rng: np.random.Generator, number: int) -> dict[str, np.ndarray]:
    """Returns scores with ties, items without vectors and texts without a common term."""
    scores = {name: rng.integers(-3, 4, number).astype(np.float32) for name in NAMES}
    scores["bm25"] = np.maximum(scores["bm25"], 0)
    scores["maxsim"][rng.random(number) < 0.1] = -np.inf
    scores["single_vector"][rng.random(number) < 0.1] = -np.inf
    return scores


def reference(
    scores: dict[str, np.ndarray], fusion: Fusion, k: int, parents: list[str] | None
) -> dict[int, float]:
    """Returns the fused scores of the items, by their literal definition."""
    fused: dict[int, float] = {}
    for name in NAMES:
        weight = getattr(fusion.weights, name)
        valid = [i for i, score in enumerate(scores["maxsim"]) if score > -np.inf]
        values = {i: float(scores[name][i]) for i in valid if scores[name][i] > -np.inf}
        if name == "bm25":
            values = {i: score for i, score in values.items() if score > 0}
        if not weight or not values:
            continue
        depth = max(fusion.depth, k)
        limit = sorted(values.values(), reverse=True)[:depth][-1]
        listed = {i for i, score in values.items() if score >= limit}
        if parents:
            best: dict[str, float] = {}
            for i, score in values.items():
                best[parents[i]] = max(best.get(parents[i], -np.inf), score)
            limit = sorted(best.values(), reverse=True)[:depth][-1]
            listed |= {i for i, s in values.items() if s == best[parents[i]] >= limit}
        better = min(
            sum(scores["maxsim"][j] > scores["maxsim"][i] for j in valid)
            for i, score in values.items()
            if score == max(values.values())
        )
        if fusion.agreement and better >= fusion.agreement:
            continue
        lowest = 0.0 if name == "bm25" else min(values[i] for i in listed)
        highest = max(values[i] for i in listed)
        for i in listed:
            share = (values[i] - lowest) / (highest - lowest) if highest > lowest else 1.0
            fused[i] = fused.get(i, 0.0) + weight * share
    return fused


@AGREEMENTS
@pytest.mark.parametrize("is_grouped", [False, True])
def test_equals_definition(agreement, is_grouped):
    rng = np.random.default_rng(0)
    fusion = Fusion(agreement=agreement, **SETTINGS)
    for _ in range(50):
        scores = random_scores(rng, 30)
        groups = rng.integers(0, 8, 30) if is_grouped else None
        k = int(rng.integers(1, 10))
        expected = reference(scores, fusion, k, None if groups is None else groups.tolist())
        found = fusion.scores(scores, k, groups)
        listed = np.flatnonzero(found > -np.inf).tolist()
        assert listed == sorted(expected)
        pool = pool_rows(scores, fusion, k, None, groups)
        assert set(listed) <= set(pool.tolist())
        in_pool = fusion.scores(
            {name: values[pool] for name, values in scores.items()},
            k,
            None if groups is None else groups[pool],
        )
        assert in_pool.tolist() == found[pool].tolist()
        assert found[listed] == pytest.approx([expected[i] for i in listed])


@AGREEMENTS
@pytest.mark.parametrize("group_by", [None, "parent"])
def test_shards_fuse_like_the_whole(agreement, group_by):
    """The bounds of a list are those of all shards."""
    rng = np.random.default_rng(1)
    fusion = Fusion(agreement=agreement, **SETTINGS)
    for _ in range(30):
        scores = random_scores(rng, 40)
        parents = [f"p{number}" for number in rng.integers(0, 12, 40)]
        ids = [f"i{number:02}" for number in rng.permutation(40)]
        options = SearchOptions(k=7, score="fused", fusion=fusion, group_by=group_by)
        groups = np.unique(parents, return_inverse=True)[1] if group_by else None

        def part(rows, scores=scores, ids=ids, parents=parents, groups=groups, options=options):
            components = {name: values[rows] for name, values in scores.items()}
            chosen = rows[pool_rows(components, options.fusion, options.k, rows, groups)]
            return Ranking(
                [ids[i] for i in chosen],
                [parents[i] for i in chosen],
                scores["maxsim"][chosen].tolist(),
                chosen,
                **{name: values[chosen] for name, values in scores.items()},
            )

        whole = fuse(part(np.arange(40)), options)
        shards = [part(rows) for rows in np.split(np.arange(40), [5, 20, 20])]
        merged = merge_rankings(shards, options)
        assert merged.item_ids == whole.item_ids
        assert merged.scores == whole.scores
        assert whole.scores == sorted(whole.scores, reverse=True)
        if group_by:
            assert len(set(whole.parent_ids)) == len(whole.parent_ids)
        expected = reference(scores, fusion, 7, parents if group_by else None)
        assert whole.scores == pytest.approx([expected[row] for row in whole.rows.tolist()])


def test_settings_of_other_scores_are_rejected(index_uri):
    with pytest.raises(SpecError, match=r"^score must be fused if fusion is set, got 'maxsim'"):
        parse(SearchOptions, {"fusion": {"agreement": 0}})
    for fusion in (DEFAULT_FUSION, Fusion(agreement=0)):
        with pytest.raises(SpecError) as error:
            SearchOptions(score="fused", fusion=fusion).resolve(IndexReader(index_uri))
        assert str(error.value) == (
            "fusion.weights must be set for the score fused, got None; fit them with `maxray"
            " evaluate SPEC --fit-fusion fusion.yaml`"
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "rrf"}, r"^unknown field 'method'"),
        ({"weights": {"bm25": -1}}, r"^weights\.bm25 must be .*0"),
        ({"weights": {"maxsim": 0, "bm25": 0}}, r"^weights\.maxsim must be above 0 if"),
        ({"weights": {"bm": 1}}, r"^unknown field 'bm' in weights"),
        ({"depth": 0}, r"^depth must be"),
        ({"depth": 2}, r"^agreement must be at most depth = 2, got 3"),
        ({"weights": {"maxsim": 0}}, r"^agreement must be 0 if the weight of maxsim is 0, got 3"),
    ],
)
def test_invalid_settings(fields, message):
    with pytest.raises(SpecError, match=message):
        parse(Fusion, fields)
