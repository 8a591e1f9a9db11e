"""Measures against numbers worked out by hand, and runs through files."""

import math

import pytest

from pipeline.config import SpecError
from pipeline.eval.metrics import means, parse_measure, per_query, read_run, write_run

QRELS = {"q1": {"a": 2, "b": 1, "c": 0}, "q2": {"d": 1}, "q3": {"e": 1}}
RUN = {"q1": {"c": 3.0, "a": 2.0, "x": 1.5, "b": 1.0}, "q2": {"d": 1.0}, "other": {"a": 1.0}}


def test_measures_by_hand():
    values = per_query(RUN, QRELS, ["nDCG@10", "R@2", "RR@10", "AP"])
    gain = 2 / math.log2(3) + 1 / math.log2(5)
    ideal = 2 + 1 / math.log2(3)
    assert values["q1"]["nDCG@10"] == pytest.approx(gain / ideal)
    assert values["q1"]["R@2"] == pytest.approx(1 / 2)
    assert values["q1"]["RR@10"] == pytest.approx(1 / 2)
    assert values["q1"]["AP"] == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert values["q2"] == dict.fromkeys(values["q2"], 1.0)


def test_a_judged_query_without_hits_counts_as_nothing_found():
    for run in (RUN, {**RUN, "q3": {}}):
        values = per_query(run, QRELS, ["R@10"])
        assert list(values) == ["q1", "q2", "q3"]
        assert values["q3"] == {"R@10": 0.0}
        assert means(values)["R@10"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["nDGC@10", "nDCG@x", ""])
def test_unknown_measure(name):
    with pytest.raises(SpecError, match="names of ir-measures such as nDCG@5"):
        parse_measure(name)


def test_run_survives_a_file(tmp_path):
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


def test_a_run_is_replaced_or_left_alone(tmp_path):
    path = str(tmp_path / "a.trec")
    write_run(path, {"q": {"a": 1.0}}, tag="old")
    with pytest.raises(AttributeError):
        write_run(path, {"q": {"b": 1.0}, "r": None}, tag="new")
    assert read_run(path) == {"q": {"a": 1.0}}
    write_run(path, {"q": {"b": 1.0}}, tag="new")
    assert read_run(path) == {"q": {"b": 1.0}}
    assert len(list(tmp_path.iterdir())) == 1


def test_broken_run(tmp_path):
    (tmp_path / "a.trec").write_text("q Q0 a 1 0.5 t\nq Q0 b 2\n")
    with pytest.raises(SpecError, match="stands in line 2 of"):
        read_run(str(tmp_path / "a.trec"))
