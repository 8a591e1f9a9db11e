"""Tables, sentences and the plot from results given by hand."""

import csv
import io

import pytest
from matplotlib.image import imread

from pipeline.eval.plot import panels, quality_bytes_png, quality_bytes_svg
from pipeline.eval.report import (
    against_bm25,
    aligned,
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
        "hpool_32.hybrid, 0.4900 (98.0 %) with 25,000 of 150,000 bytes per item (16.7 %).",
        "BM25 reaches 0.3500. No row loses to it significantly.",
    ]
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.9] * 12)
    lost = evaluation_of([bm25, result(quality=[0.5] * 12)])
    assert list(summary(lost))[-1].startswith(
        "BM25 reaches 0.9000. These lose to it significantly: hpool_32.late (p"
    )
    assert against_bm25(lost.standings[1]).startswith("loses to BM25 (p ")
    assert against_bm25(evaluation.standings[5]).startswith("below BM25, not significantly (p = ")
    assert against_bm25(evaluation.standings[3]) == ""


@pytest.mark.parametrize("rows", [slice(0, 6), slice(0, 2), slice(1, 2), slice(2, 3), slice(4, 5)])
def test_plot_is_a_picture_whatever_there_is_to_draw(results, rows):
    evaluation = evaluation_of(results[rows])
    picture = imread(io.BytesIO(quality_bytes_png(evaluation)))
    assert picture.std() > 0.01
    assert min(picture.shape[:2]) > 500
    for score in panels(evaluation):
        svg = quality_bytes_svg(evaluation, score)
        assert svg.startswith("<svg") and "currentColor" in svg
        assert "<image" not in svg and "purl.org" not in svg
