"""Federated search against a literal implementation, and members that are missing or fail."""

import math
import re
import warnings
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from pipeline.config import SpecError, parse
from pipeline.encoders.minilm import MiniLM
from pipeline.index import ITEMS
from pipeline.schema import SPAN
from pipeline.search.federated import FederatedSearcher, MemberWarning
from pipeline.search.federation import Federation
from pipeline.search.options import SearchOptions
from pipeline.search.searcher import open_index
from tests.search.vectors import DIM, OTHER_SCHEMA, SCHEMA, rows, unit, write

WEIGHTS = {"a": 1.0, "b": 0.5, "c": 0.25}
VECTORS = [unit((3, DIM), seed).astype(np.float32) for seed in range(100, 104)]
QUERIES = [query / np.linalg.norm(query, axis=1, keepdims=True) for query in VECTORS]


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> dict[str, dict]:
    """Three indexes with windows of the same videos. Two share item ids and their encoder."""
    folder = tmp_path_factory.mktemp("federation")
    lengths = {"a": 10.0, "b": 10.0, "c": 25.0}  # seconds per window
    for seed, (name, seconds) in enumerate(lengths.items()):
        names, spans = [], []
        for video in range(6):
            for start in np.arange(0, 60, seconds).tolist():
                names.append(f"v{video}/{start:g}" + ("" if seconds == 10 else "-long"))
                spans.append({"unit": "seconds", "start": start, "end": start + seconds})
        spans[-1] = None  # the whole video
        order = np.random.default_rng(seed).permutation(len(names))[: 30 if name == "b" else None]
        table = rows([names[i] for i in order], [4] * len(order), seed)
        column = pa.array([spans[i] for i in order], SPAN)
        table = table.set_column(table.column_names.index("span"), "span", column)
        write(str(folder / name), table, OTHER_SCHEMA if name == "c" else SCHEMA)
    return {name: {"index": str(folder / name), "weight": WEIGHTS[name]} for name in lengths}


def literal(members, query, k, join, depth):
    """Returns (item id, score, {member: (rank, item id)}) of the k best hits, with plain loops."""
    hits = []  # member, rank, id, parent, range, score
    for name in members:
        ranked = []
        for row in lance.dataset(f"{members[name]['index']}/{ITEMS}").to_table().to_pylist():
            score = sum(max(float(np.dot(q, v)) for v in np.float32(row["full"])) for q in query)
            ranked.append((-score, row["item_id"], row["parent_id"], row["span"]))
        ranked.sort(key=lambda row: row[:2])
        if join == "parent":
            firsts = {}
            for row in ranked:
                firsts.setdefault(row[2], row)
            ranked = list(firsts.values())
        ranked = ranked[: max(depth, k)]
        for rank, row in enumerate(ranked, start=1):
            span = (row[3]["start"], row[3]["end"]) if row[3] else (-math.inf, math.inf)
            hits.append((name, rank, row[1], row[2], span, -row[0]))

    scales = {"a": "f", "b": "f", "c": "g"}

    values = {}  # weighted share of each hit among those of its scale
    for scale in "fg":
        same = [hit for hit in hits if scales[hit[0]] == scale]
        deviation = np.std([hit[5] for hit in same])
        shares = [math.exp(hit[5] / deviation) for hit in same]
        values |= {
            hit: WEIGHTS[hit[0]] * share / sum(shares)
            for hit, share in zip(same, shares, strict=True)
        }

    def is_joined(hit, other):
        if join == "item":
            return hit[2] == other[2]
        if join == "parent":
            return hit[3] == other[3]
        (start, end), (other_start, other_end) = hit[4], other[4]
        return hit[3] == other[3] and start < other_end and other_start < end

    scored = []
    for hit in hits:
        found = {}
        for name in members:
            mine = [other for other in hits if other[0] == name and is_joined(hit, other)]
            if name == hit[0]:
                mine = [hit]
            if mine:
                found[name] = min(mine, key=lambda other: other[1])
        total = 0
        for scale in "fg":
            same = [values[other] for name, other in found.items() if scales[name] == scale]
            total += max(same, default=0)
        id = hit[3] if join == "parent" else hit[2]
        length = hit[4][1] - hit[4][0] if join == "overlap" else 0
        scored.append(((-total, length, id, hit[1], list(members).index(hit[0])), hit, found))
    scored.sort(key=lambda row: row[0])
    best = []
    for key, hit, found in scored:
        if not any(hit[0] != other[0] and is_joined(hit, other) for _, other, _ in best):
            best.append((key, hit, found))
    return [
        (hit[2], -key[0], {name: (other[1], other[2]) for name, other in found.items()})
        for key, hit, found in best[:k]
    ]


@pytest.mark.parametrize("join", ["item", "parent", "overlap"])
@pytest.mark.parametrize(("k", "depth"), [(5, 20), (30, 1)])
def test_equals_a_literal_implementation(members, join, k, depth):
    federation = {"members": members, "join": join, "depth": depth}
    searcher = FederatedSearcher(federation, cache=False)
    options = parse(SearchOptions, {"k": k, "explain": "matches"})
    found, _ = searcher.search_with(QUERIES, options)
    for query, hits in zip(QUERIES, found, strict=True):
        expected = literal(members, query, k, join, depth)
        assert [hit.item_id for hit in hits] == [item_id for item_id, _, _ in expected]
        assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
        for hit, (_, score, ranks) in zip(hits, expected, strict=True):
            assert hit.score == pytest.approx(score, abs=1e-5)
            assert {m.member: (m.rank, m.item_id) for m in hit.members} == ranks
            assert hit.matches and hit.text == f"The text of {hit.item_id}"
    assert searcher.search_with(QUERIES, options)[0] == found
    assert searcher.search(QUERIES[0], k=k) == found[0]


def test_hits_are_described_by_the_member_that_ranks_them_best(members):
    federation = {"members": {"a": members["a"], "b": members["b"]}, "depth": 60}
    by_name = {name: open_index(members[name]["index"], cache=False) for name in ("a", "b")}
    hits = FederatedSearcher(federation, cache=False).search(QUERIES[0], k=40)
    alone = {name: searcher.search(QUERIES[0], k=60) for name, searcher in by_name.items()}
    described = []
    for hit in hits:
        for member in hit.members:
            single = alone[member.member][member.rank - 1]
            assert (single.item_id, single.score) == (hit.item_id, member.score)
        best = min(hit.members, key=lambda member: member.rank)
        single = alone[best.member][best.rank - 1]
        assert (hit.matches, hit.parts) == (single.matches, single.parts)
        described.append(best.member)
    assert set(described) == {"a", "b"}


def test_one_member_keeps_its_ranking(members):
    hits = FederatedSearcher({"members": {"a": members["a"]}}, cache=False).search(QUERIES[0], k=7)
    alone = open_index(members["a"]["index"], cache=False).search(QUERIES[0], k=7)
    assert [hit.item_id for hit in hits] == [hit.item_id for hit in alone]


def test_filters_of_the_members_and_of_the_search(members):
    filtered = {"a": {**members["a"], "filter": "parent_id <> 'v1'"}, "b": members["b"]}
    searcher = FederatedSearcher({"members": filtered}, cache=False)
    hits = searcher.search(QUERIES[0], k=99, filter="parent_id = 'v1' OR parent_id = 'v2'")
    found = {(m.member, hit.parent_id) for hit in hits for m in hit.members}
    assert found == {("a", "v2"), ("b", "v1"), ("b", "v2")}
    hits = searcher.search(QUERIES[0], k=99, parents=["v3"])
    assert {hit.parent_id for hit in hits} == {"v3"}
    with pytest.raises(SpecError, match=r"^members.a.filter must be "):
        searcher.search(QUERIES[0], filter="parent_id = 'v1') OR (parent_id = 'v2'")


def test_queries_are_encoded_once_per_encoder(index_uri, monkeypatch):
    calls = []
    encode = MiniLM.encode_queries
    monkeypatch.setattr(
        MiniLM, "encode_queries", lambda self, texts: calls.append(texts) or encode(self, texts)
    )
    members = {
        "tokens": {"index": index_uri, "representation": "full"},
        "few": {"index": index_uri, "representation": "hpool_2"},
        "single": {"index": index_uri, "score": "single_vector"},
    }
    searcher = FederatedSearcher({"members": members})
    texts = ["the lift of a wing", "how to bake bread"]
    found = searcher.search(texts, k=3)
    assert calls == [texts]
    assert [hits[0].parent_id for hits in found] == ["wing", "bread"]
    assert {member.member for member in found[0][0].members} == set(members)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"index": "nowhere"},
            r"index must be the URI of an index of Maxray, got 'nowhere', which",
        ),
        ({"version": 9}, r"version must be a stored version from 1 to 1, got 9, which does not"),
    ],
)
def test_missing_members_are_a_warning_or_an_error(members, fields, sentence):
    federation = {"members": {**members, "b": {**members["b"], **fields}}}
    without = {"members": {"a": members["a"], "c": members["c"]}}
    searcher = FederatedSearcher(federation, cache=False)
    with pytest.warns(MemberWarning, match=f"^member b is left out: {sentence}"):
        hits = searcher.search(QUERIES[0])
    with warnings.catch_warnings(record=True):
        assert hits == FederatedSearcher(without, cache=False).search(QUERIES[0])
    with pytest.raises(SpecError, match=f"^members.b.{sentence}"):
        FederatedSearcher({**federation, "require_all": True})
    with pytest.raises(SpecError, match=f"^members.b.{sentence}"):
        FederatedSearcher({"members": {"b": federation["members"]["b"]}})


def test_members_that_fail_later(members, tmp_path):
    """Another dimension of the query, and data files that are deleted before the description."""
    copies = {}
    for name in ("a", "b"):
        table = lance.dataset(f"{members[name]['index']}/{ITEMS}").to_table()
        write(str(tmp_path / name), table)
        copies[name] = {"index": str(tmp_path / name)}
    searcher = FederatedSearcher({"members": copies}, cache=False)
    expected = FederatedSearcher({"members": {"a": copies["a"]}}, cache=False).search(QUERIES[0])
    searcher.search(QUERIES[0])  # the vectors of both are in memory
    for path in Path(tmp_path / "b" / ITEMS / "data").iterdir():
        path.unlink()
    with pytest.warns(MemberWarning, match="^member b is left out: index must be an intact index"):
        hits = searcher.search(QUERIES[0])
    assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
    strict = FederatedSearcher({"members": members, "require_all": True}, cache=False)
    message = "query must be vectors of dimension 16, got 'vectors of dimension 3'"
    for failing in (searcher, strict):
        with pytest.raises(SpecError, match=f"^{message}$"):
            failing.search(np.ones((2, 3)))
    with pytest.raises(SpecError, match="^query must be a text with at least one word, got ' '$"):
        searcher.search(" ")


@pytest.mark.parametrize("join", ["item", "parent"])
def test_members_without_common_ids(members, join):
    federation = {"members": {"a": members["a"], "c": members["c"]}, "join": join}
    searcher = FederatedSearcher(federation, cache=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        searcher.search(QUERIES[0])
    expected = [
        f"member {name} has no item_id in common with another member, so that its hits are not "
        "joined"
        for name in ("a", "c")
    ]
    assert [str(each.message) for each in caught] == (expected if join == "item" else [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 0}, r"members.a.weight must be greater than 0, got 0"),
        ({"weight": -1}, r"members.a.weight must be greater than 0, got -1"),
        ({"weight": math.nan}, r"members.a.weight must be a finite number, got nan"),
        ({"representation": "ful"}, r"members.a.representation must be .*, got 'ful'"),
        ({"candidates": "ivf"}, r"members.a.candidates must be .*, got 'ivf'"),
        ({"filter": "x = 1"}, r"members.a.filter must be .*, got 'x = 1'"),
        ({"score": "fused"}, r"members.a.fusion.weights must be set for the score fused, got None"),
        ({"k": 3}, r"unknown field 'k' in members.a; valid fields: index, "),
    ],
)
def test_invalid_members(members, fields, message):
    """They are errors although there are other members."""
    with pytest.raises(SpecError, match=f"^{message}"):
        FederatedSearcher({"members": {**members, "a": {**members["a"], **fields}}})


def test_invalid_federations(members, tmp_path):
    with pytest.raises(SpecError, match=r"^members must have at least 1 item"):
        FederatedSearcher({"members": {}})
    with pytest.raises(SpecError, match=r"^field 'members' is required"):
        FederatedSearcher({})
    with pytest.raises(SpecError, match=r"^join must be 'item', 'parent' or 'overlap'"):
        parse(Federation, {"members": members, "join": "title"})
    nested = {"members": {"a": {"index": "other.yaml"}}}
    with pytest.raises(SpecError, match=r"^members.a.index must be .*, which is a spec \(a federa"):
        FederatedSearcher(nested)
    with pytest.raises(SpecError, match=r"^federation must be a YAML file .*does not exist$"):
        FederatedSearcher(str(tmp_path / "none.yaml"))
    with pytest.raises(SpecError, match=r"^device must be .*cpu.*, got 'tpu', which is not avail"):
        FederatedSearcher({"members": members}, device="tpu")
    searcher = FederatedSearcher({"members": members}, cache=False)
    assert searcher.search([]) == []
    with pytest.raises(SpecError, match=r"^query must be a text, .*, got 'int'$"):
        searcher.search(3)
    message = re.escape("score must be set in the members of the federation, got 'hybrid'")
    with pytest.raises(SpecError, match=f"^{message}$"):
        searcher.search(QUERIES[0], score="hybrid")


def test_ties_are_sorted_by_id(tmp_path):
    """Two indexes have the same vectors of items with other ids."""
    for name in ("a", "b"):
        ids = [f"{10 * number}{name}" for number in range(6)]
        write(str(tmp_path / name), rows(ids, [4] * 6, 0))
    found = []
    for names in ("ab", "ba"):
        ordered = {name: {"index": str(tmp_path / name)} for name in names}
        hits = FederatedSearcher({"members": ordered}, cache=False).search(QUERIES[0], k=12)
        found.append([(hit.item_id, hit.score) for hit in hits])
    assert found[0] == found[1]
    firsts, seconds = found[0][::2], found[0][1::2]
    for (first, score), (second, same) in zip(firsts, seconds, strict=True):
        assert (second, same) == (first.replace("a", "b"), score) and first.endswith("a")


def test_a_member_whose_best_hit_stands_out_counts_more(tmp_path):
    """The hits of `sharp` are as good as those of `flat` but for the best one."""
    for name in ("flat", "sharp"):
        table = rows([f"{name}{number}" for number in range(20)], [1] * 20, 3)
        vectors = table["full"].to_pylist()
        if name == "sharp":
            vectors[7] = QUERIES[0][:1].astype(np.float16).tolist()
        column = pa.array(vectors, table.schema.field("full").type)
        position = table.column_names.index("full")
        table = table.set_column(position, table.schema.field("full"), column)
        write(str(tmp_path / name), table, OTHER_SCHEMA if name == "sharp" else SCHEMA)
    spec = {name: {"index": str(tmp_path / name)} for name in ("flat", "sharp")}
    hits = FederatedSearcher({"members": spec}, cache=False).search(QUERIES[0][:1], k=40)
    assert hits[0].item_id == "sharp7" and hits[0].score > hits[1].score
    assert sum(hit.score for hit in hits) == pytest.approx(2)


def test_parts_of_an_index_rank_like_the_whole(members, tmp_path):
    """Scores by the same encoder and compressor are comparable, so no hit counts twice."""
    table = lance.dataset(f"{members['a']['index']}/{ITEMS}").to_table()
    for name, part in (("few", table.slice(0, 5)), ("many", table.slice(3))):
        write(str(tmp_path / name), part)
    spec = {name: {"index": str(tmp_path / name)} for name in ("few", "many")}
    searcher = FederatedSearcher({"members": spec}, cache=False)
    whole = open_index(members["a"]["index"], cache=False)
    for query in QUERIES:
        hits, expected = (one.search(query, k=36) for one in (searcher, whole))
        assert [hit.item_id for hit in hits] == [hit.item_id for hit in expected]
        assert sum(len(hit.members) for hit in hits) == 38


def test_members_with_the_same_ids_and_other_files(tmp_path):
    """The second part of a revision hashes the file. Equal files and other modalities are fine."""
    files = {"a": ["1.x", "2.y", "3.z"], "b": ["4.x", "5.other", "6.z"], "c": ["7", "8", "9"]}
    for name, revisions in files.items():
        table = rows(["p", "q", "r"], [2] * 3, 0)
        position = table.column_names.index("revision")
        column = pa.array(revisions, pa.string())
        write(str(tmp_path / name), table.set_column(position, "revision", column))
    spec = {name: {"index": str(tmp_path / name)} for name in files}
    with pytest.warns(MemberWarning) as caught:
        FederatedSearcher({"members": spec}, cache=False).search(QUERIES[0])
    assert [str(each.message) for each in caught] == [
        "members a and b have different files for items of the same id, such as q, whose hits are "
        "joined all the same"
    ]
