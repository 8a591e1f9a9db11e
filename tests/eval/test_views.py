"""Data behind the figures, for given results."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.eval.results import Budget
from pipeline.eval.views import (
    common_budget,
    comparable_rows,
    correlations,
    depth_scans,
    layer_scans,
    line_name,
    retention_lines,
    scanned_rows,
)
from tests.eval.evaluations import diagnosed, diagnosed_rows, evaluation_of, reranked


@pytest.fixture
def rows():
    return diagnosed_rows()


def test_layer_scans(rows):
    evaluation = evaluation_of(rows)
    sap, eos = layer_scans(evaluation)
    assert (sap.name, sap.budget, list(sap.rows)) == ("sap", Budget(None, 0.1), [0, 1, 2, 3])
    assert [r.retention.mean for r in eos.rows.values()] == [0.5, 0.6]
    assert scanned_rows(evaluation) == {r.name for r in rows if "layers" in r.method}
    # A single layer or several layers per row are not scans.
    single = [diagnosed("a", "sap layers=[1]", 0.1, 0.1, ratio=0.3, layers=[1])]
    pair = [diagnosed("b", "sap layers=[1, 2]", 0.1, 0.1, ratio=0.1, layers=[1, 2])]
    assert len(layer_scans(evaluation_of([*rows, *single, *pair]))) == 2


def test_common_budget(rows):
    evaluation = evaluation_of(rows)
    assert common_budget(evaluation) == Budget(None, 0.1)
    assert [r.representation for r in comparable_rows(evaluation)] == [
        "full",
        "random_0",
        "hpool_10",
        "adaptive_10",
    ]
    assert common_budget(evaluation_of(rows[:1])) is None
    assert [r.representation for r in comparable_rows(evaluation_of(rows[:1]))] == ["full"]
    assert common_budget(evaluation_of(rows[-2:])) == Budget(8, None)


def test_retention_lines_use_measured_fraction(rows):
    lines = retention_lines(evaluation_of(rows))
    assert set(lines) == {"random", "hpool", "adaptive_eos"}
    assert lines["hpool"] == [pytest.approx((0.1, 0.875, 0)), pytest.approx((0.2, 1.0, 0))]
    assert lines["adaptive_eos"] == [pytest.approx((0.13, 0.5, 0))]
    # Qualities 0.2, 0.3 and 0.4 relative to 0.8: mean 0.375, standard deviation 0.125.
    assert lines["random"] == [pytest.approx((0.1, 0.375, 0.125))]
    assert retention_lines(evaluation_of(rows[1:])) == {}


def test_correlations(rows):
    evaluation = evaluation_of([r for r in rows if "layers" not in r.method])
    osr, gini, cv = correlations(evaluation)
    x, y = [0.6, 0.9, 0.95, 0.6, 0.7], [0.3, 0.7, 0.8, 0.4, 0.5]
    assert osr.x.tolist() == pytest.approx(x)
    assert osr.r == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert 0 < osr.p < 0.05
    assert gini.quantity == "1/Gini at 10 %"
    assert gini.x.tolist() == pytest.approx([2.0, 4.0, 3.0])
    assert cv.x.tolist() == pytest.approx([1.0, 2.0, 1.5])
    assert gini.r == pytest.approx(np.corrcoef([2, 4, 3], [0.3, 0.7, 0.4])[0, 1])
    few = list(correlations(evaluation_of(rows[-2:])))
    assert [c.r for c in few] == [None] * 3


def test_line_names_are_unique(rows):
    other = replace(rows[-1], encoder="another")
    evaluation = evaluation_of([*rows, other])
    assert line_name(evaluation, rows[-1]) == "hpool, e1"
    assert line_name(evaluation, other) == "hpool, anothe"


def test_depth_scans(rows):
    more = [reranked(depth, "full.maxsim", False, 0.5 + depth / 100) for depth in (20, 5, 10)]
    more += [reranked(depth, "full.maxsim", True, 0.5) for depth in (5, 10)]
    more.append(reranked(10, "hpool_k8.maxsim", False, 0.6))  # a single depth is not a scan
    reranked_only, added = depth_scans(evaluation_of([*rows, *more]))
    assert reranked_only.first_stage.name == "full.maxsim" and list(reranked_only.rows) == [
        5,
        10,
        20,
    ]
    assert [row.means["nDCG@10"] for row in reranked_only.rows.values()] == [0.55, 0.6, 0.7]
    assert (reranked_only.name, added.name) == (
        "EDJE after full.maxsim",
        "EDJE after full.maxsim, scores added",
    )
    assert not depth_scans(evaluation_of(rows))
