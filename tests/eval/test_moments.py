"""Metrics of moments against a literal implementation of the official evaluation."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import SpecError, parse
from pipeline.eval import JudgedQueries
from pipeline.eval.metrics import parse_measure, per_query
from pipeline.eval.moments import Moments, Span, moment_measure
from pipeline.eval.spec import EvaluateSpec, with_main_measure

NAMES = ["R1@0.5", "R1@0.7", "R5@0.5", "mAP@0.5", "mAP@0.75", "mAP"]


def overlap(one, two):
    """Intersection over union, by counting a tenth of a second at a time."""
    first, second = ({n for n in range(*(round(10 * t) for t in pair))} for pair in (one, two))
    return len(first & second) / len(first | second)


def literal_ap(predicted, moments, threshold):
    """Average precision as in the evaluation of ActivityNet, with an array of locks."""
    taken = np.zeros(len(moments), bool)
    hits = np.zeros(len(predicted))
    for row, window in enumerate(predicted):
        ious = np.array([overlap(window, moment) for moment in moments])
        for column in np.argsort(-ious, kind="stable"):
            if ious[column] < threshold:
                break
            if not taken[column]:
                taken[column], hits[row] = True, 1
                break
    found = np.cumsum(hits)
    precision = np.hstack([0, found / np.arange(1, len(hits) + 1), 0])
    recall = np.hstack([0, found / len(moments), 1])
    for position in reversed(range(len(precision) - 1)):
        precision[position] = max(precision[position], precision[position + 1])
    steps = np.flatnonzero(recall[1:] != recall[:-1]) + 1
    return float(np.sum((recall[steps] - recall[steps - 1]) * precision[steps]))


def literal(predicted, moments):
    best = [max((overlap(w, m) for m in moments), default=0) for w in predicted]
    ap = {t: literal_ap(predicted[:10], moments, t) for t in np.arange(50, 100, 5) / 100}
    return {
        "R1@0.5": float(best[0] >= 0.5),
        "R1@0.7": float(best[0] >= 0.7),
        "R5@0.5": float(max(best[:5]) >= 0.5),
        "mAP@0.5": ap[0.5],
        "mAP@0.75": ap[0.75],
        "mAP": np.mean(list(ap.values())),
    }


def windows(rng, number, most):
    """Random ranges, on a grid of 2 s so that IoUs are often equal to a threshold."""
    starts = rng.integers(0, 40, number)
    return [
        (2.0 * s, 2.0 * (s + n)) for s, n in zip(starts, rng.integers(1, most, number), strict=True)
    ]


def test_equals_a_literal_implementation():
    rng = np.random.default_rng(0)
    predicted = {f"q{n}": windows(rng, rng.integers(1, 25), 12) for n in range(60)}
    relevant = {query: windows(rng, rng.integers(1, 5), 15) for query in predicted}
    spans = {
        f"{query}/{rank}": Span("v", *window)
        for query, found in predicted.items()
        for rank, window in enumerate(found)
    }
    run = {
        query: {f"{query}/{rank}": -float(rank) for rank in range(len(found))}
        for query, found in predicted.items()
    }
    moments = Moments(dict.fromkeys(predicted, "v"), relevant, spans=spans)
    found = per_query(run, {query: {} for query in [*predicted]}, NAMES, moments)
    totals = dict.fromkeys(NAMES, 0.0)
    for query in predicted:
        expected = literal(predicted[query], relevant[query])
        assert found[query] == pytest.approx(expected, abs=1e-12)
        totals = {name: totals[name] + expected[name] for name in NAMES}
    assert all(1 < totals[name] < 59 for name in NAMES)  # none is trivial


def test_a_query_of_the_official_format():
    """[0, 70] and [78, 146] for the moment [82, 150]: IoUs 0 and 64/72; the third is a repeat."""
    spans = {"a": Span("v", 0, 70), "b": Span("v", 78, 146), "c": Span("v", 82, 150)}
    spans["d"] = Span("w", 82, 150)
    moments = Moments({"2579": "v"}, {"2579": [(82, 150)]}, spans=spans)

    def values(order):
        run = {"2579": {name: -float(rank) for rank, name in enumerate(order)}}
        return per_query(run, {"2579": {}}, NAMES, moments)["2579"]

    found = values("abc")
    assert (found["R1@0.5"], found["R5@0.5"], found["mAP@0.5"]) == (0, 1, 0.5)
    assert found["mAP"] == pytest.approx(0.8 * 1 / 2 + 0.2 * 1 / 3)  # up to 0.85, and above
    assert values("dx")["R5@0.5"] == 0  # another video, and an item of none
    assert per_query({}, {"2579": {}}, NAMES, moments)["2579"] == dict.fromkeys(NAMES, 0.0)


def test_names():
    assert moment_measure("mAP") == moment_measure("mAP@0.5")._replace(
        thresholds=(0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    )
    assert parse_measure("R100@0.7").params["cutoff"] == 100
    for name in ("R@0.5", "R1@5", "R0@0.5", "mAP@", "R1@0.5 "):
        assert moment_measure(name) is None
        with pytest.raises(SpecError, match="^measures must be MdR or an ir-measures name"):
            parse_measure(name)
    fields = {"index": "i", "output": "o", "benchmark": {"name": "beir", "path": "p"}}
    spec = parse(EvaluateSpec, {**fields, "measures": ["R1@0.5"]})
    with pytest.raises(SpecError, match=r"^measures must be a metric of documents, got 'R1@0.5', "):
        with_main_measure(spec, JudgedQueries({"q": "a"}, {"q": {"d": 1}}, 0, 0))
    with pytest.raises(SpecError, match=r"^k must be at least 200 for R200@0.5, got 100"):
        parse(EvaluateSpec, {**fields, "measures": ["R200@0.5"]})
