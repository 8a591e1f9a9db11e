"""Weights of query tokens against literal float64 implementations, and their counts."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import pytest
import torch

from pipeline import open_index
from pipeline.config import SpecError, parse
from pipeline.index.reader import Index
from pipeline.registry import CODECS
from pipeline.search.maps import similarity_map
from pipeline.search.maxsim import backends, maxsim
from pipeline.search.options import SearchOptions
from pipeline.search.packed import PackedVectors, Segment
from pipeline.search.query import Queries, QueryEncoders
from pipeline.search.token_weights import TokenFrequencies
from pipeline.search.token_weights_job import TokenFrequenciesSpec, count_tokens, run
from tests.search.conftest import random_queries, random_rows, reference_score

QUERY = "The lift of the wing"


@pytest.fixture(scope="module")
def uri(index_uri, tmp_path_factory) -> str:
    """Copy of the index with token frequencies."""
    uri = str(tmp_path_factory.mktemp("frequencies") / "index")
    shutil.copytree(index_uri, uri)
    run(parse(TokenFrequenciesSpec, {"index": uri}), job="1", report=lambda line: None)
    return uri


@pytest.mark.parametrize("name", ["float16", "float32", "int8", "binary", "residual"])
def test_scores_are_weighted_sums(name):
    """Compares all backends with a literal float64 implementation."""
    rng = np.random.default_rng(0)
    vectors_TD, lengths_B = rng.normal(size=(60, 16)), np.array([7, 0, 20, 1, 32])
    vectors_TD /= np.linalg.norm(vectors_TD, axis=1, keepdims=True)
    options = {"num_centroids": 8} if name == "residual" else {}
    spec = CODECS.resolve({"name": name, **options})
    fit = getattr(CODECS.load(name), "fit", None)
    state = fit(spec, vectors_TD.astype(np.float32)) if name == "residual" else None
    codec = CODECS.build(spec, state)
    parts = codec.quantise(torch.from_numpy(vectors_TD).float())
    packed = PackedVectors([Segment(codec, 16, parts, torch.from_numpy(lengths_B))])
    decoded_TD = codec.dequantise(parts, 16).double().numpy()
    weights = [rng.uniform(0, 3, 5), np.array([0.0, 2.5, 1.0])]
    given = Queries.from_vectors([rng.normal(size=(len(w), 16)) for w in weights], weights)
    tokens = [codec.transform_queries(tokens_MD) for tokens_MD in given.tokens]
    weighted = Queries(tokens, None, given.token_texts, weights=given.weights).weighted_tokens
    expected_QB = np.full((2, 5), -np.inf)
    for q, (tokens_MD, weights_M) in enumerate(zip(tokens, weights, strict=True)):
        for b, end in enumerate(lengths_B.cumsum()):
            if lengths_B[b]:
                item_ND = decoded_TD[end - lengths_B[b] : end]
                best_M = (tokens_MD.double().numpy() @ item_ND.T).max(axis=1)
                expected_QB[q, b] = sum(w * s for w, s in zip(weights_M, best_M, strict=True))
    for backend in backends(packed):
        found_QB = maxsim(weighted, packed, backend=backend).numpy()
        np.testing.assert_allclose(found_QB, expected_QB, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("score", ["maxsim", "hybrid"])
@pytest.mark.parametrize("candidates", ["exact", "single"])
def test_search_with_given_weights(make_index, score, candidates):
    rng = np.random.default_rng(1)
    rows, queries = random_rows(rng, 40), random_queries(rng, 4)
    # Powers of two keep the sums and means of the literal implementation exact.
    weights = [2.0 ** rng.integers(-1, 3, len(tokens)) for tokens in queries.tokens]
    searcher = make_index(rows)
    options = {"score": score, "candidates": candidates}
    rankings = searcher.rank(queries.with_weights(weights), k=8, num_candidates=20, **options)
    for number, ranking in enumerate(rankings):
        by_id = {row.item_id: row for row in rows}
        assert len(ranking.item_ids) == 8
        for item_id, found in ranking.scores_by_item().items():
            row = by_id[item_id]
            tokens, weights_M = queries.tokens[number].numpy(), weights[number]
            best_M = [max(float(q @ token) for token in row.tokens) for q in tokens]
            expected = sum(w * s for w, s in zip(weights_M, best_M, strict=True))
            if score == "hybrid":
                single = reference_score(row, queries, number, "single_vector").total
                expected = single + expected / weights_M.sum()
            assert found == pytest.approx(expected, rel=1e-6)


def test_weights_of_one_change_nothing(make_index):
    rng = np.random.default_rng(2)
    rows, queries = random_rows(rng, 30), random_queries(rng, 3)
    searcher = make_index(rows)
    plain = searcher.rank(queries, score="hybrid", k=30)
    ones = searcher.rank(
        queries.with_weights([np.ones(len(tokens)) for tokens in queries.tokens]),
        score="hybrid",
        k=30,
    )
    assert [r.scores_by_item() for r in ones] == [r.scores_by_item() for r in plain]


def test_queries_keep_their_weights():
    first = Queries.from_vectors([np.eye(3)], [[0, 1, 2]])
    second = Queries.from_vectors([np.eye(3)[:2]])
    joined = pickle.loads(pickle.dumps(Queries.join([first, second])))
    assert [weights.tolist() for weights in joined.weights] == [[0, 1, 2], [1, 1]]
    assert [part.weights[0].tolist() for part in joined.split()] == [[0, 1, 2], [1, 1]]
    assert Queries.join([second, second]).weights is None
    assert first.total_weights == [3.0] and second.total_weights == [2.0]


@pytest.mark.parametrize(
    "weights", [[1, 2], [1, -1, 0], [0, 0, 0], [1, np.nan, 1], [[1], [1, 2]], "abc", [1, 1, 1e39]]
)
def test_invalid_weights(weights):
    with pytest.raises(SpecError, match=r"^weights must be 3 finite numbers >= 0 with at least"):
        Queries.from_vectors([np.eye(3)], [weights])


def test_idf_weights():
    """Compares the weights with a literal float64 implementation."""
    counts = {"the": 10, "lift": 2, "wing": 1}
    frequencies = TokenFrequencies(10, counts, frozenset(["[CLS]", "[SEP]"]))
    texts = ["[CLS]", "The", "lift", "of", "the", "Wing", "[SEP]"]
    for power in (0.5, 1.0, 2.0):
        idf = [
            np.log(
                1 + (10 - counts.get(text.lower(), 0) + 0.5) / (counts.get(text.lower(), 0) + 0.5)
            )
            ** power
            for text in texts[1:-1]
        ]
        expected = [1.0, *(np.array(idf) / np.mean(idf)), 1.0]
        found = frequencies.weights(texts, power)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert frequencies.weights(["[CLS]", "[SEP]"], 1.0).tolist() == [1.0, 1.0]
    restored = TokenFrequencies.from_artefact(frequencies.to_artefact())
    assert restored == frequencies


def test_counts_items_with_a_token(index_uri):
    encoder = QueryEncoders(Index(index_uri)).encoder("full")
    long_text = " ".join(["the wing", *(f"word{i}" for i in range(100)), "lift"])
    texts = ["The wing the", "a WING", None, "", "  ", long_text]
    frequencies = count_tokens(encoder, iter(texts))
    assert frequencies.num_items == 6
    assert {t: frequencies.counts[t] for t in ("the", "wing", "lift", "a")} == {
        "the": 2, "wing": 3, "lift": 1, "a": 1
    }  # fmt: skip
    assert not frequencies.markers & set(frequencies.counts)
    tokens = encoder.query_token_texts([QUERY])[0]
    assert tokens == encoder.encode_queries([QUERY]).token_texts[0]


def test_search_with_idf_weights_equals_given_weights(uri):
    searcher = open_index(uri)
    encoded = searcher.queries([QUERY], "hpool_4")
    info = searcher.representation("hpool_4")
    weighted = searcher.queries([QUERY], "hpool_4", 0.5)
    (weights_M,) = weighted.weights
    by_token = dict(zip(weighted.token_texts[0], weights_M.tolist(), strict=True))
    assert by_token["wing"] > by_token["the"]
    expected = searcher.rank(encoded.with_weights([weights_M]), info.name)
    found = searcher.rank([QUERY], info.name, idf_power=0.5)
    assert [r.scores_by_item() for r in found] == [r.scores_by_item() for r in expected]
    plain = searcher.rank([QUERY], info.name)
    assert found[0].scores != plain[0].scores


@pytest.mark.parametrize("representation", ["full", "hpool_4"])
def test_explanations_are_consistent_with_the_score(uri, representation):
    searcher = open_index(uri)
    plain = {hit.item_id: hit for hit in searcher.search(QUERY, representation)}
    hits = searcher.search(QUERY, representation, idf_power=1.0)
    for hit in hits:
        similarities = [match.similarity for match in hit.matches]
        weights = [match.weight for match in hit.matches]
        score = sum(w * s for w, s in zip(weights, similarities, strict=True))
        assert hit.score == pytest.approx(score, rel=1e-4)
        assert hit.parts.maxsim_mean == pytest.approx(hit.score / sum(weights), rel=1e-5)
        others = plain[hit.item_id].matches
        assert similarities == [other.similarity for other in others]
        for match, other in zip(hit.matches, others, strict=True):
            assert match.contribution == pytest.approx(match.weight * other.contribution, abs=1e-6)
            assert other.weight == 1.0
        map = similarity_map(searcher, QUERY, hit.item_id, representation, 1.0)
        assert map.score == pytest.approx(hit.score, rel=1e-4)
        assert map.contributions == pytest.approx([m.contribution for m in hit.matches], abs=1e-6)
        assert map.passages == hit.passages


def test_sharded_search(uri, cluster):
    from pipeline.search.sharded import ShardedSearcher

    expected = open_index(uri).search([QUERY, "heat"], "hpool_4", idf_power=1.0)
    with ShardedSearcher(uri, num_shards=2, num_cpus=0.5) as searcher:
        found = searcher.search([QUERY, "heat"], "hpool_4", idf_power=1.0)
    for hits, others in zip(found, expected, strict=True):
        assert [hit.item_id for hit in hits] == [other.item_id for other in others]
        assert [hit.matches for hit in hits] == [other.matches for other in others]
        scores = [other.score for other in others]
        assert [hit.score for hit in hits] == pytest.approx(scores, rel=1e-5)


def test_counting_again_replaces_the_counts(uri, tmp_path):
    shutil.copytree(uri, tmp_path / "index")
    spec = parse(TokenFrequenciesSpec, {"index": str(tmp_path / "index"), "max_items": 3})
    before = Index(spec.index).dataset.config()
    assert run(spec, job="2", report=lambda line: None).num_items == 3
    after = Index(spec.index).dataset.config()
    (key,) = [key for key in after if "frequencies" in key]
    assert before[key] != after[key]
    run(spec, job="3", report=lambda line: None)
    assert Index(spec.index).dataset.config()[key] == after[key]
    assert Index(spec.index).lease() is None


def test_invalid_options(index_uri, uri):
    with pytest.raises(
        SpecError, match=r"^idf_power must be null, got 1.0, which needs token freq"
    ):
        open_index(index_uri).rank([QUERY], idf_power=1.0)
    for power in (0, -1, 5, float("nan"), "1", True):
        with pytest.raises(SpecError, match=r"^idf_power must be a number > 0 and <= 4, got"):
            SearchOptions(idf_power=power)
    with pytest.raises(SpecError, match=r"^idf_power must be null for the score single_vector"):
        SearchOptions(score="single_vector", idf_power=1.0)
    searcher = open_index(uri)
    with pytest.raises(SpecError, match=r"^idf_power must be null for queries other than texts"):
        searcher.rank([np.ones((2, 384))], idf_power=1.0)
    weighted = searcher.queries([QUERY], None, 1.0)
    with pytest.raises(SpecError, match=r"^idf_power must be null for queries with weights"):
        searcher.rank(weighted, idf_power=1.0)
