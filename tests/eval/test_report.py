"""Tables, sentences and the plot from results given by hand."""

import csv
import io
import re
from dataclasses import replace

import pytest
from matplotlib.image import imread

from pipeline.eval.plot import Panel, _figure, panels, quality_bytes_png, quality_bytes_svg
from pipeline.eval.report import (
    against_bm25,
    aligned,
    categories_csv,
    fitting,
    markdown,
    metrics_csv,
    per_query_csv,
    summary,
    table,
)
from tests.eval.conftest import DIAGNOSIS, evaluation_of, result


def test_cells(evaluation):
    header, *rows = table(evaluation)
    row = dict(zip(header, rows[3], strict=True))
    p, p_bm25 = row.pop("p"), row.pop("p BM25")
    assert 0 < float(p) <= 1 and 0 < float(p_bm25) <= 1
    assert row == {
        "representation": "hpool_32",
        "method": "hpool",
        "K": "32",
        "score": "late",
        "nDCG@10": "0.4100",
        "AP": "0.2050",
        "retention": "82.0 %",
        "against": "full.late",
        "p random": "-",
        "OSR": "-",
        "used": "-",
        "Gini": "-",
        "pareto": "*",
        "pareto all": "*",
        "vectors/item": "31.5",
        "B/item": "24,192",
        "B/item all": "26,000",
        "queries/s": "1,234.5",
        "ms": "1.50",
        "ms p95": "2.25",
    }
    assert [row[2] for row in rows[:3]] == ["-", "1", "all"]
    assert dict(zip(header, rows[0], strict=True))["B/item"] == "-"


def test_diagnostics_and_seeds_in_tables(results):
    seeds = {name: {"nDCG@10": 0.4, "OSR": osr} for name, osr in (("a", 0.7), ("b", 0.8))}
    random = {"name": "random", "num_vectors": 32, "seed": 0}
    row = result("a", "random", compressor=random, diagnosis=DIAGNOSIS, seeds=seeds)
    header, *cells = table(evaluation_of([row, results[3]]))
    shown = dict(zip(header, cells[0], strict=True))
    assert (shown["method"], shown["OSR"]) == ("random (2 seeds)", "0.750")
    assert (shown["used"], shown["Gini"]) == ("50.0 %", "0.400")
    first, second = csv.DictReader(io.StringIO(metrics_csv(evaluation_of([row, results[3]]))))
    numbers = {
        "OSR": (0.5 + 1 + 0.75) / 3,
        "OSR ratio of means": 6 / 8,
        "OSR pairs": 3,
        "OSR left out": 0,
        "used": 0.5,
        "used_relevant": 0.25,
        "gini": 0.4,
        "cv": 120,
        "similarity_mean": 0.23,
        "num_seeds": 2,
        "nDCG@10 sd": 0,
        "OSR sd": 0.005**0.5,
    }
    assert {name: float(first[name]) for name in numbers} == pytest.approx(numbers)
    assert {second[name] for name in numbers} == {""}


def test_plain_and_markdown_hold_every_cell(evaluation):
    cells = table(evaluation)
    lines = aligned(cells).splitlines()
    assert [line.split() for line in lines[1:]] == [" ".join(row).split() for row in cells[1:]]
    assert len({len(line) for line in lines}) == 1  # the last column is one of numbers
    assert markdown(cells).splitlines()[1] == "| " + " | ".join(["---"] * len(cells[0])) + " |"


def test_csv_is_not_rounded(evaluation):
    rows = list(csv.DictReader(io.StringIO(metrics_csv(evaluation))))
    assert [row["representation"] for row in rows] == [r.representation for r in evaluation.results]
    assert float(rows[2]["queries_per_second"]) == 1234.5
    assert rows[2]["num_vectors"] == rows[2]["p_reference"] == ""
    assert float(rows[3]["retention"]) == evaluation.standings[3].retention
    assert (rows[3]["pareto"], rows[5]["pareto"]) == ("True", "False")
    assert len(per_query_csv(evaluation).splitlines()) == 1 + 2 * len(rows)


def test_summary(evaluation):
    assert list(summary(evaluation)) == [
        "Best quality: full.late, nDCG@10 0.5000.",
        "Cheapest with at least 95 % of the quality of the full tokens (full.late, 0.5000): "
        "hpool_32.hybrid, 0.4900 (98.0 %) with 25,000 of 150,000 bytes per item (16.7 %) of vectors"
        " and 27,000 of 151,000 bytes per item (17.9 %) of everything stored.",
        "BM25 reaches 0.3500. The other 5 rows against it: 5 not significantly different.",
    ]


def against(*rows):
    """The sentence about BM25 at 0.5, beside rows of so much quality."""
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.5] * 12)
    others = [result(f"r{i}", quality=[value] * 12) for i, value in enumerate(rows)]
    return list(summary(evaluation_of([bm25, *others])))[-1]


def test_the_summary_counts_wins_ties_and_losses_against_bm25():
    assert (
        against(0.9, 0.8)
        == "BM25 reaches 0.5000. The other 2 rows against it: 2 significantly better."
    )
    assert (
        against(0.5)
        == "BM25 reaches 0.5000. The other 1 row against it: 1 not significantly different."
    )
    assert re.fullmatch(
        r"BM25 reaches 0\.5000\. The other 3 rows against it: 1 significantly better, "
        r"1 not significantly different, 1 significantly worse: r2\.late \(p (=|<) 0\.00\d\)\.",
        against(0.9, 0.5, 0.1),
    )
    assert against() == "BM25 reaches 0.5000."


def test_correlations_are_no_headline(results):
    rows = [
        result(f"r{i}", f"m{i}", 32, quality=[0.1 * i, 0.2 * i], diagnosis=DIAGNOSIS)
        for i in range(1, 5)
    ]
    assert not any("Pearson" in line for line in summary(evaluation_of([*results, *rows])))


def test_what_was_fitted(results):
    own = {"num_items": 64, "evaluated": 64, "origin": {}}
    apart = {"num_items": 1, "evaluated": 0, "origin": {"source": {"name": "text", "path": "some"}}}
    index = {"num_items": 9, "evaluated": 2, "origin": {"index": "out/a", "where": "x = 1"}}
    old = {"num_items": None, "evaluated": None, "origin": {}}
    rows = [result(f"r{i}", fitted=fitted) for i, fitted in enumerate([own, apart, index, old, {}])]
    assert [fitting(row) for row in rows] == [
        "64 items of the index, all of them evaluated",
        "1 item of a separate sample (some), none of them evaluated",
        "9 items of a separate sample (out/a where x = 1), 2 of them evaluated",
        "items of the index; which ones was not recorded",
        "",
    ]
    said = [line for line in summary(evaluation_of(rows)) if line.startswith("Fitted on")]
    assert said == [f"Fitted on {fitting(rows[i])}: r{i}." for i in (0, 2, 3)]
    numbers = list(csv.DictReader(io.StringIO(metrics_csv(evaluation_of(rows)))))
    assert [row["fitted_on"] for row in numbers] == ["64", "1", "9", "", ""]
    assert [row["fitted_on_evaluated"] for row in numbers] == ["64", "0", "2", "", ""]


def test_quality_by_category(evaluation):
    categories = {"kind": {"plain": ["q0"], "other": ["q1"]}}
    rows = categories_csv(replace(evaluation, categories=categories)).splitlines()
    assert rows[0] == "row,field,category,num_queries,nDCG@10"
    assert rows[1:3] == ["bm25,kind,plain,1,0.3", "bm25,kind,other,1,0.4"]
    assert len(rows) == 1 + 2 * len(evaluation.results)


def test_two_pareto_fronts():
    rows = [
        result("a", quality=[0.4, 0.4], vector_bytes=10.0, all_bytes=100.0),
        result("b", quality=[0.3, 0.3], vector_bytes=20.0, all_bytes=20.0),
        result("c", quality=[0.2, 0.2], vector_bytes=30.0, all_bytes=200.0),
    ]
    standings = evaluation_of(rows).standings
    assert [standing.pareto for standing in standings] == [True, False, False]
    assert [standing.pareto_all for standing in standings] == [True, True, False]


@pytest.mark.parametrize(("bm25", "is_line"), [(0.405, True), (0.05, False), (0.95, False)])
def test_a_distant_bm25_does_not_flatten_the_plot(bm25, is_line):
    """The other rows take at least half of the axis, whatever BM25 reaches."""
    rows = [result(f"h{i}", num_vectors=i, quality=[0.4 + i / 100] * 2) for i in range(1, 6)]
    row = result("bm25", "bm25", None, "bm25", encoder="", quality=[bm25] * 2)
    figure = _figure(evaluation_of([row, *rows]), [Panel("late", "vector_bytes")])
    (axis,) = figure.axes
    low, high = axis.get_ylim()
    assert 0.04 < high - low < 2 * 0.04
    assert (low <= bm25 <= high) == is_line
    labels = [line.get_label() for line in axis.get_lines()]
    texts = [text.get_text() for text in axis.texts]
    assert ("BM25" in labels) == is_line and (f"BM25: {bm25:.3f}" in texts) == (not is_line)


def test_rows_against_bm25(evaluation):
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.9] * 12)
    lost = evaluation_of([bm25, result(quality=[0.5] * 12)])
    assert against_bm25(lost.standings[1]).startswith("loses to BM25 (p ")
    assert against_bm25(evaluation.standings[5]).startswith("below BM25, not significantly (p = ")
    assert against_bm25(evaluation.standings[3]) == ""


@pytest.mark.parametrize("rows", [slice(0, 6), slice(0, 2), slice(1, 2), slice(2, 3), slice(4, 5)])
def test_plot_is_a_picture_whatever_there_is_to_draw(results, rows):
    evaluation = evaluation_of(results[rows])
    picture = imread(io.BytesIO(quality_bytes_png(evaluation)))
    assert picture.std() > 0.01
    assert min(picture.shape[:2]) > 500
    for panel in panels(evaluation):
        svg = quality_bytes_svg(evaluation, panel)
        assert svg.startswith("<svg") and "currentColor" in svg
        assert "<image" not in svg and "purl.org" not in svg
