"""Diagnostics against their definitions, computed with float64 loops."""

import numpy as np
import pytest
import torch

from pipeline.eval.diagnostics import (
    Diagnosis,
    Matches,
    coefficient_of_variation,
    gini,
    inter_token_similarity,
    match_pairs,
    matching_strength,
    mean_diagnosis,
    score_retention,
    strength_profile,
    used_vectors,
)
from pipeline.search.packed import PackedVectors
from pipeline.tokens import normalise

LENGTHS = [5, 0, 1, 9, 3, 0, 70]
ROWS = [np.array([0, 3]), np.array([2]), np.array([], np.int64), np.array([3, 4, 6])]


@pytest.fixture
def packed() -> PackedVectors:
    generator = np.random.default_rng(2)
    values_TD = torch.from_numpy(generator.normal(size=(sum(LENGTHS), 16)) - 0.2).half()
    return PackedVectors.from_values(values_TD, torch.tensor(LENGTHS))


@pytest.fixture
def queries() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, 16, generator=generator) for length in (4, 1, 2, 6)]


def item(packed, row) -> np.ndarray:
    return packed.item(row).numpy().astype(np.float64)


def expected_pair(query, doc) -> tuple[float, list[int], list[float]]:
    best, positions = [], []
    for token in query.numpy().astype(np.float64):
        similarities = [float(sum(token * vector)) for vector in doc]
        best.append(max(similarities))
        positions.append(similarities.index(max(similarities)))
    return sum(best), positions, best


def test_match_pairs(packed, queries):
    matches = match_pairs(queries, packed, ROWS)
    starts = np.cumsum(LENGTHS) - LENGTHS
    scores, records = [], []
    for query, rows in zip(queries, ROWS, strict=True):
        for row in rows.tolist():
            score, positions, best = expected_pair(query, item(packed, row))
            scores.append(score)
            records += [
                (p, i, s, starts[row] + p)
                for i, (p, s) in enumerate(zip(positions, best, strict=True))
            ]
    assert matches.scores.tolist() == pytest.approx(scores, rel=1e-5)
    assert matches.document.tolist() == [record[0] for record in records]
    assert matches.query.tolist() == [record[1] for record in records]
    assert matches.similarity.tolist() == pytest.approx([r[2] for r in records], rel=1e-5, abs=1e-4)
    assert matches.vectors.tolist() == [record[3] for record in records]

    strength = matching_strength(matches, 70)
    assert strength.shape == (70, 6)
    for position in range(70):
        for i in range(6):
            values = [r[2] for r in records if r[:2] == (position, i)]
            count = sum(r[1] == i for r in records)
            assert strength[position, i] == pytest.approx(sum(values) / count, abs=1e-4)


def test_no_relevant_items(packed, queries):
    matches = match_pairs(queries, packed, [np.array([], np.int64)] * 4)
    assert len(matches.scores) == 0
    strength = matching_strength(matches, 0)
    assert strength.shape == (0, 0)
    assert (gini(strength), coefficient_of_variation(strength), strength_profile(strength)) == (
        None,
        None,
        [],
    )


@pytest.mark.parametrize("rows", [np.arange(7), np.array([1, 3, 5]), np.array([], np.int64)])
def test_used_vectors(packed, queries, rows, monkeypatch):
    expected = set()
    starts = np.cumsum(LENGTHS) - LENGTHS
    for query in queries:
        for row in rows.tolist():
            if LENGTHS[row]:
                positions = expected_pair(query, item(packed, row))[1]
                expected |= {int(starts[row]) + p for p in positions}
    assert set(np.flatnonzero(used_vectors(queries, packed, rows)).tolist()) == expected
    monkeypatch.setattr("pipeline.eval.diagnostics.TOKENS_PER_BATCH", 2)
    assert set(np.flatnonzero(used_vectors(queries, packed, rows)).tolist()) == expected


def test_score_retention():
    pairs = [(1.0, 2.0), (3.0, 4.0), (0.5, 0.0), (2.0, -1.0), (-1.0, 1.0)]
    retention = score_retention(pairs)
    assert retention.mean == pytest.approx((0.5 + 0.75 + 1 - 1) / 4)
    assert retention.ratio_of_means == pytest.approx((1 + 3 + 0.5 - 1) / (2 + 4 + 0 + 1))
    assert (retention.num_pairs, retention.num_left_out) == (4, 1)
    assert score_retention([(0.0, 0.0)]).ratio_of_means == 1
    assert score_retention([]) is None and score_retention([(1.0, -1.0)]) is None


def test_gini_and_coefficient_of_variation():
    strengths = np.abs(np.random.default_rng(4).normal(size=(6, 5)))
    flat = strengths.flatten().tolist()
    mean = sum(flat) / 30
    deviation = (sum((x - mean) ** 2 for x in flat) / 30) ** 0.5
    assert coefficient_of_variation(strengths) == pytest.approx(100 * deviation / mean)
    # Gini coefficient: half the mean absolute difference divided by the mean.
    differences = sum(abs(x - y) for x in flat for y in flat) / 900
    assert gini(strengths) == pytest.approx(differences / 2 / mean)
    one_hot = np.zeros((2, 5))
    one_hot[1, 3] = 2.0
    assert gini(one_hot) == pytest.approx(0.9)
    assert coefficient_of_variation(one_hot) == pytest.approx(300)
    assert gini(np.full((3, 3), 0.7)) == pytest.approx(0)
    assert gini(one_hot - np.eye(2, 5)) == pytest.approx(0.9)  # negative values count as 0


def test_similarity_by_position(packed):
    rows = np.array([0, 1, 2, 3, 4])
    similarity = inter_token_similarity(packed, rows)
    items = [item(packed, row) for row in rows if LENGTHS[row]]
    items = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in items]
    assert similarity.map.shape == (9, 9) and similarity.num_items == 4
    for p in range(9):
        for q in range(9):
            cosines = [float(v[p] @ v[q]) for v in items if max(p, q) < len(v)]
            assert similarity.map[p, q] == pytest.approx(np.mean(cosines), abs=1e-5)
    means = [
        np.mean([v[p] @ v[q] for p in range(len(v)) for q in range(len(v)) if p != q])
        for v in items
        if len(v) > 1
    ]
    assert similarity.mean == pytest.approx(np.mean(means), abs=1e-5)


def test_similarity_map_of_long_items_is_binned(packed):
    similarity = inter_token_similarity(packed, np.array([3, 6]))
    assert similarity.map.shape == (64, 64)
    vectors = [item(packed, row) for row in (3, 6)]
    vectors = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in vectors]
    bins = [p * 64 // 70 for p in range(70)]
    for a, b in ((0, 0), (0, 5), (10, 63), (5, 7)):
        cosines = [
            float(v[p] @ v[q])
            for v in vectors
            for p in range(len(v))
            for q in range(len(v))
            if (bins[p], bins[q]) == (a, b)
        ]
        assert similarity.map[a, b] == pytest.approx(np.mean(cosines), abs=1e-5)


def test_large_indexes_are_sampled(packed):
    rows = np.arange(7)
    sample = inter_token_similarity(packed, rows, max_items=2)
    assert sample.num_items == 2
    again = inter_token_similarity(packed, rows, max_items=2)
    assert np.array_equal(sample.map, again.map) and sample.mean == again.mean
    assert inter_token_similarity(packed, np.array([1])).mean is None


def test_strength_profile():
    strength = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert strength_profile(strength) == [1.5, 3.5, 5.5]
    assert strength_profile(strength, max_bars=2) == [2.5, 5.5]


def diagnosis(pairs, **fields) -> Diagnosis:
    defaults = {
        "full": "full",
        "num_missing": 0,
        "used": 0.5,
        "used_relevant": 0.25,
        "cv": 100.0,
        "gini": 0.5,
        "num_positions": 2,
        "strengths": [0.5, 0.1],
        "similarity": [[1.0, 0.2], [0.2, 1.0]],
        "similarity_mean": 0.2,
        "num_sampled": 3,
    }
    return Diagnosis(pairs=pairs, **{**defaults, **fields})


def test_mean_diagnosis_has_mean_retention():
    a = diagnosis({"q": [[1.0, 2.0], [1.0, 4.0]], "r": [[3.0, 3.0]]}, used=0.4, gini=None)
    b = diagnosis({"q": [[2.0, 2.0], [3.0, 4.0]], "r": [[2.0, 3.0]]}, strengths=[0.1, 0.3])
    both = mean_diagnosis([a, b])
    for query_ids in (None, ["q"], ["r"]):
        mean = (a.retention(query_ids).mean + b.retention(query_ids).mean) / 2
        assert both.retention(query_ids).mean == pytest.approx(mean)
    assert both.retention(["unknown"]) is None
    assert (both.used, both.gini) == (pytest.approx(0.45), 0.5)
    assert both.strengths == pytest.approx([0.3, 0.2])


def test_mean_diagnosis_of_different_queries():
    a = diagnosis({"q": [[1.0, 2.0]], "r": [[3.0, 3.0]]})
    b = diagnosis({"q": [[2.0, 2.0]]}, strengths=[0.1])
    both = mean_diagnosis([a, b])
    assert both.pairs == {"q": [[1.5, 2.0]]}
    assert both.strengths == a.strengths


def test_matching_strength_is_normalised_by_query_position():
    matches = Matches(
        scores=np.array([1.0]),
        document=np.array([0, 0, 1]),
        query=np.array([0, 0, 1]),
        similarity=np.array([0.5, 0.3, -0.2]),
        vectors=np.array([0, 0, 1]),
    )
    assert matching_strength(matches, 2).tolist() == [[0.4, 0.0], [0.0, -0.2]]


@pytest.mark.parametrize("max_length", [3, 64, 300])
def test_similarity_equals_sums_of_single_tokens_bit_for_bit(max_length):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, max_length + 1, (20,), generator=generator).tolist()
    values_TD = torch.randn(sum(lengths), 32, generator=generator)
    packed = PackedVectors.from_values(values_TD, torch.tensor(lengths))
    num_rows = min(64, max(lengths))
    sums, counts = np.zeros((num_rows, num_rows)), np.zeros((num_rows, num_rows))
    for row, n in enumerate(lengths):
        bin_N = torch.arange(n) * num_rows // max(lengths)
        sums_RD = torch.zeros(num_rows, 32)
        for position, vector_D in zip(bin_N, normalise(packed.item(row)), strict=True):
            sums_RD[position] += vector_D
        count_R = np.bincount(bin_N.numpy(), minlength=num_rows)
        sums += (sums_RD @ sums_RD.T).numpy()
        counts += np.outer(count_R, count_R)
    similarity = inter_token_similarity(packed, np.arange(20))
    np.testing.assert_array_equal(similarity.map, sums / np.maximum(counts, 1))
