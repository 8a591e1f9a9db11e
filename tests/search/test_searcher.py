"""Search on a real index against brute force, and its options."""

import contextvars
import functools
import shutil

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.config import SpecError
from pipeline.encoders.minilm import MiniLM
from pipeline.index.reader import ITEMS
from pipeline.schema import column_metadata, with_metadata
from pipeline.search import pauses
from pipeline.search.maxsim import maxsim_oracle
from pipeline.search.options import SearchOptions
from pipeline.search.query import Queries
from pipeline.search.searcher import open_index
from pipeline.tokens import flat_from_arrow, pad

QUERIES = ["the lift of a wing", "how to bake bread", "heat at the nose of a body"]


@pytest.fixture(scope="module")
def searcher(index_uri):
    return open_index(index_uri)


@pytest.fixture(scope="module")
def encoder() -> MiniLM:
    return MiniLM(MiniLM.Spec())


def brute_force(index_uri, encoder, text, representation, score) -> dict[str, float]:
    """Returns scores by item id, computed item by item from the stored columns."""
    table = lance.dataset(f"{index_uri}/{ITEMS}").to_table()
    encoded = encoder.encode_queries([text])
    query_MD = encoded.tokens.vectors[0][encoded.tokens.mask[0]]
    padded, mask = pad(*flat_from_arrow(table[representation]))
    summed, _ = maxsim_oracle(query_MD, padded, mask, reduce="mean" if score == "hybrid" else "sum")
    pooled = np.array(table["minilm_pooled"].to_pylist(), np.float32)
    pooled_scores = torch.from_numpy(pooled) @ encoded.tokens.pooled[0]
    scores = {"maxsim": summed, "single_vector": pooled_scores, "hybrid": summed + pooled_scores}[
        score
    ]
    pairs = zip(table["item_id"].to_pylist(), scores.tolist(), strict=True)
    return {item_id: value for item_id, value in pairs if value > -np.inf}


@pytest.mark.parametrize("representation", ["full", "hpool_4", "hpool_2", "random_4"])
@pytest.mark.parametrize("score", ["maxsim", "single_vector", "hybrid"])
def test_equals_brute_force(searcher, index_uri, encoder, representation, score):
    for text in QUERIES:
        hits = searcher.search(text, representation, k=100, score=score)
        expected = brute_force(index_uri, encoder, text, representation, score)
        assert {hit.item_id for hit in hits} == set(expected)
        assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
        for hit in hits:
            assert hit.score == pytest.approx(expected[hit.item_id], abs=1e-4)
        scores = [hit.score for hit in hits]
        assert scores == sorted(scores, reverse=True)


def test_hits_contain_stored_fields(searcher, texts):
    best = searcher.search("a wing in a slipstream")[0]
    assert best.parent_id == "wing"
    assert (best.title, best.text) == (f"On {best.item_id}", texts[best.item_id])


def test_items_without_vectors_are_not_returned(searcher, texts):
    item_ids = [hit.item_id for hit in searcher.search("bread", "hpool_2", k=100)]
    assert set(texts) - set(item_ids) == {"bread/2"}


def test_k_truncates_the_ranking(searcher):
    all_hits = searcher.search(QUERIES[0], k=100)
    assert searcher.search(QUERIES[0], k=3) == all_hits[:3]


def test_batch_equals_single_queries(searcher):
    together = searcher.search(QUERIES, k=4)
    for text, hits in zip(QUERIES, together, strict=True):
        single = searcher.search(text, k=4)
        assert [hit.item_id for hit in hits] == [hit.item_id for hit in single]
        for hit, other in zip(hits, single, strict=True):
            assert hit.score == pytest.approx(other.score, abs=1e-5)


def test_vectors_and_encoded_queries_equal_texts(searcher, encoder):
    encoded = encoder.encode_queries(QUERIES)
    by_text = [[hit.item_id for hit in hits] for hits in searcher.search(QUERIES, k=4)]
    tokens = encoded.tokens
    vectors = [row[mask].numpy() for row, mask in zip(tokens.vectors, tokens.mask, strict=True)]
    for batch in (encoded, vectors, [3.0 * query for query in vectors]):
        assert [[hit.item_id for hit in hits] for hits in searcher.search(batch, k=4)] == by_text
    assert [hit.item_id for hit in searcher.search(vectors[0], k=4)] == by_text[0]
    assert [ranking.item_ids for ranking in searcher.rank(encoded, k=4)] == by_text


@pytest.mark.parametrize("score", ["maxsim", "hybrid"])
def test_slices_give_equal_results(searcher, monkeypatch, score):
    """Results do not depend on the size of slices."""
    texts = ["lift of a wing", "heat", "crust of the bread"]
    queries, rows = searcher.queries(texts, "full"), np.array([0, 2, 3, 5])
    options = SearchOptions(representation="full", k=5, score=score, candidates="exact")
    for selected in (None, rows):
        expected = searcher.scorer.rank(queries, options, selected)
        monkeypatch.setattr("pipeline.search.score.SLICE_PAIRS", 200)
        context, counted = contextvars.copy_context(), []
        context.run(pauses.action.set, functools.partial(counted.append, 1))
        rankings = context.run(searcher.scorer.rank, queries, options, selected)
        assert len(counted) >= 3
        for ranking, other in zip(rankings, expected, strict=True):
            assert (ranking.item_ids, ranking.scores) == (other.item_ids, other.scores)


def test_group_by_parent_returns_the_best_item(searcher, texts):
    all_hits = searcher.search("a wing in a slipstream", k=100)
    parents = list(dict.fromkeys(hit.parent_id for hit in all_hits))
    assert len(parents) < len(texts)
    for k in (1, 3, 100):
        grouped = searcher.search("a wing in a slipstream", k=k, group_by="parent")
        assert [hit.parent_id for hit in grouped] == parents[:k]
        for hit in grouped:
            best = next(other for other in all_hits if other.parent_id == hit.parent_id)
            assert (hit.item_id, hit.score) == (best.item_id, best.score)


def test_filter_is_applied_before_ranking(searcher):
    all_hits = searcher.search("lift", k=100)
    expected = [hit for hit in all_hits if hit.item_id.startswith("heat") or hit.item_id == "flow"]
    filter = "parent_id = 'heat' OR item_id = 'flow'"
    for k in (1, 2, 100):
        hits = searcher.search("lift", k=k, filter=filter)
        assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected[:k]]
        scores = [hit.score for hit in expected[:k]]
        assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-5)
        assert hits[0].matches[0].query_token == "lift"
    grouped = searcher.search("lift", filter=filter, group_by="parent")
    parents = list(dict.fromkeys(hit.parent_id for hit in expected))
    assert [hit.parent_id for hit in grouped] == parents
    assert searcher.search("lift", filter="item_id = 'nothing'") == []
    assert searcher.search("lift", filter="item_id = 'nothing'", group_by="parent") == []


def test_ties_are_sorted_by_item_id(index_uri, tmp_path):
    """The copies of a row are not written in the order of their ids."""
    shutil.copytree(index_uri, tmp_path / "index")
    items = str(tmp_path / "index" / ITEMS)
    row = lance.dataset(items).to_table(filter="item_id = 'flow'")
    for name in ("z", "b", "m", "a", "y"):
        copy = row.set_column(0, row.schema.field("item_id"), pa.array([name]))
        copy = copy.set_column(1, row.schema.field("parent_id"), pa.array([f"of {name}"]))
        lance.write_dataset(copy, items, mode="append")
    searcher = open_index(str(tmp_path / "index"))
    for k in (1, 2, 4, 6):
        hits = searcher.search("supersonic flow past a cone", k=k)
        assert [hit.item_id for hit in hits] == ["a", "b", "flow", "m", "y", "z"][:k]
        grouped = searcher.search("supersonic flow past a cone", k=k, group_by="parent")
        assert [hit.item_id for hit in grouped] == ["a", "b", "flow", "m", "y", "z"][:k]


def test_deleted_items_and_old_versions(index_uri, tmp_path):
    shutil.copytree(index_uri, tmp_path / "index")
    uri = str(tmp_path / "index")
    dataset = lance.dataset(f"{uri}/{ITEMS}")
    version = dataset.version
    before = open_index(uri).search(QUERIES[0], k=3)
    dataset.delete(f"item_id = '{before[0].item_id}'")
    after = open_index(uri).search(QUERIES[0], k=2)
    assert [hit.item_id for hit in after] == [hit.item_id for hit in before[1:]]
    assert after[0].matches == before[1].matches
    assert open_index(uri, version).search(QUERIES[0], k=3) == before


@pytest.mark.parametrize("representation", ["full", "hpool_4", "random_4"])
def test_matches(searcher, index_uri, encoder, representation):
    text = "lift of a wing"
    hit = searcher.search(text, representation, k=1)[0]
    table = lance.dataset(f"{index_uri}/{ITEMS}").to_table(filter=f"item_id = '{hit.item_id}'")
    row = table.to_pylist()[0]
    encoded = encoder.encode_queries([text])
    query_MD = encoded.tokens.vectors[0][encoded.tokens.mask[0]].numpy()
    sim_MN = query_MD @ np.array(row[representation], np.float32).T
    assert [match.query_token for match in hit.matches] == encoded.token_texts[0]
    assert [match.document_token for match in hit.matches] == sim_MN.argmax(axis=1).tolist()
    assert hit.score == pytest.approx(sum(match.similarity for match in hit.matches), abs=1e-4)
    for match in hit.matches:
        if representation == "full":
            spans = [row["minilm_spans"][match.document_token]]
        elif representation == "random_4":
            token = row["random_4_assignment"][match.document_token]
            spans = [row["minilm_spans"][token]]
        else:
            support = row["hpool_4_assignment"]
            spans = [
                span
                for span, output in zip(row["minilm_spans"], support, strict=True)
                if output == match.document_token
            ]
        characters = {i for start, end in spans for i in range(start, end)}
        assert characters
        assert {i for start, end in match.spans for i in range(start, end)} == characters


def test_words_match_themselves(searcher):
    hit = searcher.search("slipstream", "full", k=1)[0]
    matched = [hit.text[start:end].lower() for match in hit.matches for start, end in match.spans]
    assert "".join(matched) == "slipstream"


@pytest.mark.parametrize("representation", ["hpool_4", "hpool_2"])
@pytest.mark.parametrize("text", ["slipstream", "the lift of a wing", "hypersonic heat transfer"])
def test_passages_of_merged_vectors_are_those_of_the_tokens(searcher, representation, text):
    """A merged vector is equally similar to all of its words; the stored tokens tell them apart."""
    hit = searcher.search(text, representation, k=1)[0]
    (same,) = searcher.search(text, "full", ids=[hit.item_id])
    assert hit.passages and hit.matches != same.matches
    for passage, expected in zip(hit.passages, same.passages, strict=True):
        assert (passage.span, passage.box) == (expected.span, expected.box)
        assert passage.contribution == pytest.approx(expected.contribution, abs=1e-4)


@pytest.mark.parametrize("text", ["slipstream", "propeller", "measured"])
def test_passages_of_merged_vectors_without_stored_tokens(index_uri, tmp_path, text):
    """The word of the query is preferred to other words of its vector."""
    shutil.copytree(index_uri, tmp_path / "index")
    uri = str(tmp_path / "index")
    lance.dataset(f"{uri}/{ITEMS}").drop_columns(["full"])
    (hit,) = open_index(uri).search(text, "hpool_4", ids=["wing/1"])
    start, end = hit.passages[0].span
    assert text in hit.text[start:end]


def test_without_stored_positions_matches_have_no_spans(index_uri, tmp_path, texts):
    shutil.copytree(index_uri, tmp_path / "index")
    uri = str(tmp_path / "index")
    lance.dataset(f"{uri}/{ITEMS}").drop_columns(["minilm_spans", "hpool_4_assignment"])
    searcher = open_index(uri)
    for representation in ("full", "hpool_4", "random_4"):
        hits = searcher.search("lift of a wing", representation, k=len(texts))
        assert len(hits) == len(texts)
        assert all(hit.matches and not any(m.spans for m in hit.matches) for hit in hits)


def test_explain_option(searcher):
    explained = searcher.search(QUERIES[0])
    plain = searcher.search(QUERIES[0], explain=False)
    assert [hit.item_id for hit in plain] == [hit.item_id for hit in explained]
    assert all(hit.matches for hit in explained)
    assert not any(hit.matches for hit in plain)


def test_default_representation_is_full(searcher):
    assert searcher.representation().name == "full"
    assert searcher.search("lift", k=2) == searcher.search("lift", "full", k=2)


@pytest.mark.parametrize(
    ("query", "options", "field", "rule"),
    [
        ("lift", {"representation": "hpool_9"}, "representation", "full, hpool_4, hpool_2"),
        ("lift", {"representation": "rerank_tokens"}, "representation", "full, hpool_4"),
        ("lift", {"k": 0}, "k", "greater than or equal to 1"),
        ("lift", {"score": "best"}, "score", "'maxsim', 'single_vector', 'hybrid'"),
        ("lift", {"group_by": "video"}, "group_by", "parent"),
        ("lift", {"filter": "lift of a wing"}, "filter", "does not parse near 'of' at character 6"),
        ("lift", {"filter": "colour = 'red'"}, "filter", "unknown column 'colour' at character 1"),
        (" ", {}, "query", "a text with at least one word, got ' '"),
        ("\u200b", {}, "query", "a text with at least one word, got '\\u200b'"),
        ("\ufeff\u3164\n\u2800", {}, "query", "a text with at least one word"),
        (["lift", ""], {}, "query", "a text with at least one word, got '' (query 2 of 2)"),
        (np.ones((2, 5)), {}, "query", "of dimension 384, got 'vectors of dimension 5'"),
        (np.ones(384), {}, "query", "a numeric array of shape (query tokens, dim), got 'an array"),
        (np.full((1, 384), np.nan), {}, "query", "finite in float32, got 'NaN or infinity'"),
        (np.ones((1, 384)), {"score": "hybrid"}, "score", "must be maxsim, got 'hybrid'"),
    ],
)
def test_rejects_invalid_arguments(searcher, query, options, field, rule):
    with pytest.raises(SpecError) as caught:
        searcher.search(query, **options)
    assert caught.value.field == field
    assert rule in str(caught.value)


def test_query_without_tokens_has_only_single_score(searcher):
    """CLIP encodes texts like this, because its token vectors are not comparable with images."""
    encoded = searcher.queries(["lift of a wing"])
    pooled = Queries([encoded.tokens[0][:0]], encoded.pooled, [[]])
    expected, hits = (searcher.search(q, score="single_vector", k=3)[0] for q in (encoded, pooled))
    assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
    assert [hit.score for hit in hits] == [hit.score for hit in expected]
    assert all(hit.matches == () for hit in hits)
    problem = r"needs token vectors \(the query has none\)"
    for score in ("maxsim", "hybrid"):
        with pytest.raises(
            SpecError, match=f"^score must be single_vector, got '{score}', which {problem}$"
        ):
            searcher.search(pooled, score=score)


def test_missing_index(tmp_path):
    with pytest.raises(
        SpecError, match="^index must be the URI of an index .*nothing', which does not exist"
    ):
        open_index(str(tmp_path / "nothing"))


def test_rejects_representation_of_another_encoder(index_uri, tmp_path):
    """The metadata of one representation contains another fingerprint."""
    table = lance.dataset(f"{index_uri}/{ITEMS}").to_table()
    field = table.schema.field("hpool_4")
    changed = with_metadata(field, {**column_metadata(field), "fingerprint": "0123"})
    schema = table.schema.set(table.schema.get_field_index("hpool_4"), changed)
    lance.write_dataset(table.cast(schema), str(tmp_path / ITEMS))
    searcher = open_index(str(tmp_path))
    problem = r"was built with another encoder \(fingerprint 0123, expected .*\)$"
    with pytest.raises(
        SpecError, match=f"^representation must be .* minilm, got 'hpool_4', which {problem}"
    ):
        searcher.search("lift", "hpool_4")
    assert searcher.search("lift", "full")
