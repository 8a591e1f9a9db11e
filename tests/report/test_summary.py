"""Sentences about results given by hand."""

import re

from pipeline.report.summary import against_bm25, summary
from tests.eval.evaluations import DIAGNOSIS, evaluation_of, result


def test_summary(evaluation):
    assert list(summary(evaluation)) == [
        "Best quality: full.late, nDCG@10 0.5000.",
        "Cheapest with at least 95 % of the quality of the full tokens (full.late, 0.5000): "
        "hpool_32.hybrid, 0.4900 (98.0 %) with 25,000 of 150,000 bytes per item (16.7 %) of vectors"
        " and 27,000 of 151,000 bytes per item (17.9 %) of everything stored.",
        "BM25 reaches 0.3500. The other 5 rows against it: 5 not significantly different.",
    ]


def test_tied_rows_and_a_quality_of_zero():
    rows = [result(name, "none", None, quality=[0.0] * 12) for name in ("full", "other")]
    (best,) = summary(evaluation_of(rows))
    assert best == "Best quality: full.late, other.late, nDCG@10 0.0000."


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


def test_rows_against_bm25(evaluation):
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.9] * 12)
    lost = evaluation_of([bm25, result(quality=[0.5] * 12)])
    assert against_bm25(lost.standings[1]).startswith("loses to BM25 (p ")
    assert against_bm25(evaluation.standings[5]).startswith("below BM25, not significantly (p = ")
    assert against_bm25(evaluation.standings[3]) == ""
