"""Reranking of federations against a literal implementation, and members without contents."""

from __future__ import annotations

import hashlib
import re
import shutil

import lance
import numpy as np
import pytest

from pipeline.config import SpecError, parse
from pipeline.index.reader import ITEMS
from pipeline.search.federated import FederatedSearcher, MemberWarning
from pipeline.search.options import SearchOptions
from pipeline.search.rerankers import Reranker, RerankerSpec
from pipeline.search.rerankers.contents import item_texts
from pipeline.search.results import RerankScore

QUERIES = ["the lift of a wing", "heat", "bread with a golden crust"]
NO_TEXT = {"one": "parent_id IN ('wing', 'flow')", "two": "parent_id <> 'wing'", "three": "true"}


def hashed(query: str, text: str) -> float:
    return int.from_bytes(hashlib.blake2b(f"{query}|{text}".encode(), digest_size=4).digest()) / 1e9


class Hashes(Reranker):
    """Reranker by hashes of the query and the text."""

    fingerprint = "hashes"

    def score(self, source, queries, candidates):
        texts = item_texts(source.index, (i for ids in candidates for i in ids))
        return [
            {i: RerankScore(score=hashed(query, texts[i])) for i in ids if i in texts}
            for query, ids in zip(queries, candidates, strict=True)
        ]


def reranker(**fields) -> Hashes:
    return Hashes(RerankerSpec(name="hashes", **fields))


@pytest.fixture(scope="module")
def members(index_uri, tmp_path_factory) -> dict[str, dict]:
    """Copies of an index whose items have other texts, or none. `two` lacks the items on heat."""
    folder = tmp_path_factory.mktemp("reranked")
    for name, without in NO_TEXT.items():
        shutil.copytree(index_uri, folder / name)
        dataset = lance.dataset(f"{folder / name}/{ITEMS}")
        dataset.update({"text": f"concat('{name}: ', text)"})
        dataset.update({"text": "NULL"}, where=without)
        if name == "two":
            dataset.delete("parent_id = 'heat'")
    names = {"one": "full", "two": "hpool_2", "three": "random_4"}
    return {
        name: {"index": str(folder / name), "representation": representation}
        for name, representation in names.items()
    }


def literal(members, query, hits, k, rerankers):
    """Returns (item id, score, reranker's score) of the k best hits, with plain loops."""
    texts = {}
    for name, member in members.items():
        table = lance.dataset(f"{member['index']}/{ITEMS}").to_table(["item_id", "text"])
        texts[name] = {row["item_id"]: row["text"] for row in table.to_pylist()}
    rows = []
    for hit in hits:
        joined = {member.member: member.item_id for member in hit.members}
        shown = hit.members[0].member
        read = [
            texts[name].get(joined.get(name, hit.item_id))
            for name in [shown, *(name for name in texts if name != shown)]
        ]
        rows.append([hit.item_id, hit.score, None, next(filter(None, read), None)])
    for one in rerankers:
        top, rest = rows[: one.spec.top], rows[one.spec.top :]
        for row in top:
            row[2] = None if row[3] is None else hashed(query, row[3])
        scored = [row for row in top if row[2] is not None]
        for row in scored:
            row[1] = row[2] + (row[1] if one.spec.add_first_stage else 0)
        scored.sort(key=lambda row: -row[1])
        rows = [row if row[2] is None else scored.pop(0) for row in top] + rest
    return [tuple(row[:3]) for row in rows[:k]]


@pytest.mark.parametrize("join", ["item", "parent", "overlap"])
@pytest.mark.parametrize(
    "rerankers",
    [
        [reranker(top=20)],
        [reranker(top=3, add_first_stage=True)],
        [reranker(top=6), reranker(top=2, add_first_stage=True)],
    ],
)
def test_equals_a_literal_implementation(members, join, rerankers):
    searcher = FederatedSearcher({"members": members, "join": join}, cache=False)
    results = searcher.search(QUERIES, k=4, rerank=rerankers)
    before = searcher.search(QUERIES, k=20)
    for query, hits, first in zip(QUERIES, results, before, strict=True):
        found = [(hit.item_id, hit.score, hit.rerank.score) for hit in hits]
        assert found == literal(members, query, first, 4, rerankers)
        assert [hit.rank for hit in hits] == [1, 2, 3, 4]
        for hit in hits:
            former = first[hit.first_stage.rank - 1]
            assert (former.item_id, former.score) == (hit.item_id, hit.first_stage.score)
            assert (former.members, former.matches) == (hit.members, hit.matches)
    options = parse(SearchOptions, {"k": 4})
    joined = searcher.rank_with(QUERIES, options, rerankers=rerankers).joined
    assert [list(searcher.scores(hits).values()) for hits in joined] == [[4.0, 3.0, 2.0, 1.0]] * 3


def test_items_that_no_member_can_read_keep_their_ranks(members):
    searcher = FederatedSearcher({"members": members}, cache=False)
    before = [hit.item_id for hit in searcher.search("flow past a cone", k=8)]
    model = reranker(top=8)
    hits = searcher.search("flow past a cone", k=8, rerank=model)
    (hit,) = [hit for hit in hits if hit.item_id == "flow"]
    assert (hit.rank, hit.rerank.problem) == (before.index("flow") + 1, "has no text")
    assert sum(hit.rerank.score is not None for hit in hits) == 7
    assert (model.usage.queries, model.usage.pairs, model.usage.unread) == (1, 7, 1)


def test_no_member_has_the_content(members, index_uri):
    searcher = FederatedSearcher({"members": {"three": members["three"]}}, cache=False)
    message = "rerank must be a reranker of content that a member has, got 'hashes' (no member "
    with pytest.raises(SpecError, match=f"^{re.escape(message)}has a text\\)$"):
        searcher.search("heat", rerank=reranker())
    with pytest.raises(SpecError, match="^rerank must be null unless every query is a text or an"):
        searcher.search(np.ones((2, 384), np.float32), rerank=reranker())
    with pytest.raises(SpecError, match="^query must be a text to be reranked by hashes, got 'an "):
        searcher.search(b"image", rerank=reranker())


def test_rerankers_that_some_members_support(members, monkeypatch):
    """Such as EDJE, whose tokens the other indexes lack."""

    def check(self, index, queries):
        if not index.uri.endswith(supported):
            raise SpecError("rerank.model", "m", "an EDJE whose rerank_tokens the index has")
        return queries

    monkeypatch.setattr(Hashes, "check", check)
    searcher = FederatedSearcher({"members": members}, cache=False)
    supported = "two"
    hits = searcher.search("heat", k=8, rerank=reranker())
    assert {h.parent_id for h in hits if h.rerank.score is not None} == {"wing"}
    supported = "none"
    message = (
        "rerank must be a reranker of content that a member has, got 'hashes' (member one: "
        "rerank.model must be an EDJE whose rerank_tokens the index has, got 'm'; member two: "
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        searcher.search("heat", rerank=reranker())


def test_a_member_that_cannot_be_read_is_left_out(members, tmp_path):
    """The vectors of `two` are in memory when its files are deleted."""
    shutil.copytree(members["two"]["index"], tmp_path / "two")
    copied = {**members, "two": {**members["two"], "index": str(tmp_path / "two")}}
    searcher = FederatedSearcher({"members": copied}, cache=False)
    searcher.search("wing", k=8)
    shutil.rmtree(tmp_path / "two")
    with pytest.warns(MemberWarning, match="^member two is left out: index must be an intact ind"):
        hits = searcher.search("wing", k=8, rerank=reranker(top=8))
    others = {name: member for name, member in members.items() if name != "two"}
    searcher = FederatedSearcher({"members": others}, cache=False)
    assert hits == searcher.search("wing", k=8, rerank=reranker(top=8))
