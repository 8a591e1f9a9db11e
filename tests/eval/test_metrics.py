"""Metrics against a reference implementation, and run files."""

import math
import sys
from urllib.parse import quote

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.eval.metrics import means, parse_measure, per_query, read_run, write_run

QRELS = {"q1": {"a": 2, "b": 1, "c": 0}, "q2": {"d": 1}, "q3": {"e": 1}}
RUN = {"q1": {"c": 3.0, "a": 2.0, "x": 1.5, "b": 1.0}, "q2": {"d": 1.0}, "other": {"a": 1.0}}


def test_metrics():
    values = per_query(RUN, QRELS, ["nDCG@10", "R@2", "RR@10", "AP"])
    gain = 2 / math.log2(3) + 1 / math.log2(5)
    ideal = 2 + 1 / math.log2(3)
    assert values["q1"]["nDCG@10"] == pytest.approx(gain / ideal)
    assert values["q1"]["R@2"] == pytest.approx(1 / 2)
    assert values["q1"]["RR@10"] == pytest.approx(1 / 2)
    assert values["q1"]["AP"] == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert values["q2"] == dict.fromkeys(values["q2"], 1.0)


def test_queries_without_hits_count_as_0():
    for run in (RUN, {**RUN, "q3": {}}):
        values = per_query(run, QRELS, ["R@10"])
        assert list(values) == ["q1", "q2", "q3"]
        assert values["q3"] == {"R@10": 0.0}
        assert means(values)["R@10"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "name", ["nDGC@10", "nDCG@x", "", "P", "RR(k=1)@3", "ERR@20", "alpha_nDCG@10", "IPrec@-1.0"]
)
def test_unknown_metrics(name):
    with pytest.raises(SpecError, match="an ir-measures name such as nDCG@5"):
        parse_measure(name)


def test_run_round_trip(tmp_path):
    path = str(tmp_path / "runs" / "a.trec")
    run = {
        "q1": {"b": 1.5, "a": 2.1234567},
        "q2": {"ünï/1#p": -0.5},
        "q 3": {"my file.txt": 2.0, "a%20b": 1.0, "50%": 0.5},
    }
    write_run(path, run, tag="t")
    with open(path, encoding="utf-8") as file:
        assert file.readline() == "q1 Q0 a 1 2.1234567 t\n"
    assert read_run(path) == run
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["a.trec"]


def test_run_round_trip_of_unusual_ids(tmp_path):
    """White space of all kinds, percent signs, control characters and empty ids."""
    spaces = [chr(code) for code in range(sys.maxunicode) if chr(code).isspace()]
    codes = [quote(space) for space in spaces]
    ids = [
        *(f"a{space}b" for space in spaces),
        *spaces,
        *codes,
        *(quote(code) for code in codes),
        *("", "%empty", "%25empty", "%", "%%", "%2", "%25", "%2525", "%e3%80%80", "%E3", "100 %"),
        *("\ufeffa", "\x00", "\x7f", "\u200b", "%41", "Screenshot 3.04.05\u202fPM.png"),
    ]
    run = {
        name: {document: float(-rank) for rank, document in enumerate(ids)}
        for name in ("\ufeff", *ids)
    }
    path = str(tmp_path / "a.trec")
    write_run(path, run, tag="t")
    assert read_run(path) == run
    assert [list(scores) for scores in read_run(path).values()] == [ids] * len(run)


def test_percent_signs_of_other_programs_are_not_decoded(tmp_path):
    (tmp_path / "a.trec").write_text("q Q0 a%41%2F%C3%A9 1 0.5 t\n")
    assert read_run(str(tmp_path / "a.trec")) == {"q": {"a%41%2F%C3%A9": 0.5}}


def test_runs_are_written_atomically(tmp_path):
    path = str(tmp_path / "a.trec")
    write_run(path, {"q": {"a": 1.0}}, tag="old")
    with pytest.raises(AttributeError):
        write_run(path, {"q": {"b": 1.0}, "r": None}, tag="new")
    assert read_run(path) == {"q": {"a": 1.0}}
    write_run(path, {"q": {"b": 1.0}}, tag="new")
    assert read_run(path) == {"q": {"b": 1.0}}
    assert len(list(tmp_path.iterdir())) == 1


def test_malformed_run(tmp_path):
    (tmp_path / "a.trec").write_text("q Q0 a 1 0.5 t\nq Q0 b 2\n")
    with pytest.raises(SpecError, match=r"\(line 2 of "):
        read_run(str(tmp_path / "a.trec"))
    (tmp_path / "a.trec").write_text("q Q0 a 1 0.5 t\nr Q0 a 1 0.5 t\nq Q0 a 2 0.4 t\n")
    with pytest.raises(SpecError, match=r"which occurs twice \(line 3 of "):
        read_run(str(tmp_path / "a.trec"))
    (tmp_path / "a.trec").write_text("q Q0 a 1 nan t\n")
    with pytest.raises(SpecError, match=r"\(line 1 of "):
        read_run(str(tmp_path / "a.trec"))


def reference(measure, scores, grades):
    """Computes a metric of one query from its definition; ties are ordered by descending id."""
    name, _, cutoff = measure.partition("@")
    order = sorted(sorted(scores, reverse=True), key=lambda document: -scores[document])
    if "judged_only" in name:
        order = [document for document in order if document in grades]
    order = order[: int(cutoff) if cutoff else None]
    level = 2 if "rel=2" in name else 1
    hits = [grades.get(document, 0) >= level for document in order]
    relevant = sum(grade >= level for grade in grades.values())
    if name.startswith("nDCG"):
        gain = (lambda g: 2**g - 1) if "exp-log2" in name else float
        found = [max(0, grades.get(document, 0)) for document in order]
        ideal = sorted((max(0, g) for g in grades.values()), reverse=True)
        ideal = ideal[: int(cutoff) if cutoff else None]
        found, ideal = (
            sum(gain(g) / math.log2(rank + 1) for rank, g in enumerate(values, start=1))
            for values in (found, ideal)
        )
        return found / ideal if ideal else 0.0
    if name.startswith("RR"):
        return 1 / (1 + hits.index(True)) if any(hits) else 0.0
    if name.startswith("Success"):
        return float(any(hits))
    if name == "Judged":
        return sum(document in grades for document in order) / int(cutoff)
    if name.startswith("P"):
        return sum(hits) / int(cutoff)
    if name.startswith("AP"):
        found = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit]
        return sum(found) / relevant if relevant else 0.0
    return sum(hits) / relevant if relevant else 0.0  # R


MEASURES = [
    *(f"{name}@{k}" for name in ("nDCG", "RR", "AP", "R", "P", "Success") for k in (1, 2, 5, 10)),
    *(f"nDCG(dcg='exp-log2')@{k}" for k in (1, 5, 100)),
    *("nDCG", "RR", "AP", "nDCG(dcg='exp-log2')", "Judged@5", "RR(judged_only=True)@2"),
    *("RR(rel=2)@3", "AP(rel=2)@5", "P(rel=2)@5", "Success(rel=2)@2", "nDCG(judged_only=True)@4"),
]


def test_metrics_equal_reference_with_ties():
    random = np.random.default_rng(0)
    documents = [f"d{i}" for i in range(30)] + ["ä", "Z", "a b", "1", "10", "9"]
    run, qrels = {}, {}
    for query in range(60):
        ranked = random.choice(documents, random.integers(10, 30), replace=False)
        run[f"q{query}"] = {str(d): float(random.integers(0, 4)) / 4 for d in ranked}
        judged = random.choice(documents, random.integers(1, 15), replace=False)
        qrels[f"q{query}"] = {str(d): int(random.choice([-2, 0, 0, 1, 2, 3])) for d in judged}
    values = per_query(run, qrels, MEASURES)
    for query_id, scores in run.items():
        expected = {name: reference(name, scores, qrels[query_id]) for name in MEASURES}
        assert values[query_id] == pytest.approx(expected, abs=1e-12), query_id


def test_equal_metrics_and_gains_do_not_interfere():
    names = ["nDCG(gains={1: 7})@10", "nDCG@10", "RR@10", "MRR@10"]
    values = per_query(RUN, QRELS, names)["q1"]
    separate = {name: per_query(RUN, QRELS, [name])["q1"][name] for name in names}
    assert values == separate
    assert values["RR@10"] == values["MRR@10"] == 0.5
    gain = 2 / math.log2(3) + 7 / math.log2(5)
    assert values["nDCG(gains={1: 7})@10"] == pytest.approx(gain / (7 + 2 / math.log2(3)))


@pytest.mark.parametrize("grade", [-2, -(2**31), 10**6, 2**31 - 1])
def test_unusual_grades(grade):
    """trec_eval crashes if all grades are at most -2, and takes minutes for a grade of 10**6."""
    qrels = {"q": {"a": grade, "b": grade}, "r": {"c": grade}}
    run = {"q": {"x": 2.0, "a": 1.0}, "r": {"c": 1.0}}
    names = ["nDCG@10", "nDCG(dcg='exp-log2')@10", "AP", "R@5", "RR@10", "Bpref", "infAP", "P@1"]
    values = per_query(run, qrels, names)
    assert values["r"] == pytest.approx(dict.fromkeys(names, float(grade > 0)))
    assert values["q"]["RR@10"] == (0.5 if grade > 0 else 0.0)
    ideal = 1 + 1 / math.log2(3)
    for name in names[:2]:
        expected = (1 / math.log2(3)) / ideal if grade > 0 else 0.0
        assert values["q"][name] == pytest.approx(expected)


def test_median_rank():
    rng = np.random.default_rng(0)
    documents = [f"d{i}" for i in range(8)]
    run, qrels = {}, {}
    for number in range(9):
        order = rng.permutation(documents).tolist()
        run[f"q{number}"] = {document: -float(rank) for rank, document in enumerate(order)}
        qrels[f"q{number}"] = {str(rng.choice([*documents, "absent"])): 1, order[0]: 0}
    found = per_query(run, qrels, ["MdR", "RR"])
    ranks = []
    for query_id, scores in run.items():
        relevant = {document for document, grade in qrels[query_id].items() if grade > 0}
        order = sorted(scores, key=lambda document: -scores[document])
        hits = [i + 1 for i, document in enumerate(order) if document in relevant]
        ranks.append(hits[0] if hits else len(order) + 1)
        assert found[query_id]["MdR"] == ranks[-1]
    assert means(found)["MdR"] == float(np.median(ranks))
    assert per_query({}, {"q": {"a": 1}}, ["MdR"]) == {"q": {"MdR": 1.0}}
    assert parse_measure("MdR").params == {}
