"""Sentences about given results."""

import re

from pipeline.eval.report.summary import against_bm25, summary
from tests.eval.evaluations import DIAGNOSIS, evaluation_of, result


def test_summary(evaluation):
    assert list(summary(evaluation)) == [
        "Best quality: full.maxsim, nDCG@10 0.5000.",
        "Smallest row with at least 95 % of the uncompressed quality (full.maxsim, 0.5000): "
        "hpool_32.hybrid, 0.4900 (98.0 %) with 25,000 of 150,000 vector bytes per item (16.7 %) and"
        " 27,000 of 151,000 stored bytes per item (17.9 %).",
        "BM25 reaches 0.3500. The other 5 rows compared with it: 5 not significantly different.",
    ]


def test_ties_and_zero_quality():
    rows = [result(name, "none", None, quality=[0.0] * 12) for name in ("full", "other")]
    (best,) = summary(evaluation_of(rows))
    assert best == "Best quality: full.maxsim, other.maxsim, nDCG@10 0.0000."


def bm25_sentence(*rows):
    """Returns the sentence on BM25 at 0.5 and rows with the given qualities."""
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.5] * 12)
    others = [result(f"r{i}", quality=[value] * 12) for i, value in enumerate(rows)]
    return list(summary(evaluation_of([bm25, *others])))[-1]


def test_counts_rows_better_and_worse_than_bm25():
    assert (
        bm25_sentence(0.9, 0.8)
        == "BM25 reaches 0.5000. The other 2 rows compared with it: 2 significantly better."
    )
    assert (
        bm25_sentence(0.5)
        == "BM25 reaches 0.5000. The other 1 row compared with it: 1 not significantly different."
    )
    assert re.fullmatch(
        r"BM25 reaches 0\.5000\. The other 3 rows compared with it: 1 significantly better, "
        r"1 not significantly different, 1 significantly worse: r2\.maxsim \(p (=|<) 0\.00\d\)\.",
        bm25_sentence(0.9, 0.5, 0.1),
    )
    assert bm25_sentence() == "BM25 reaches 0.5000."


def test_summary_does_not_mention_correlations(results):
    rows = [
        result(f"r{i}", f"m{i}", 32, quality=[0.1 * i, 0.2 * i], diagnosis=DIAGNOSIS)
        for i in range(1, 5)
    ]
    assert not any("Pearson" in line for line in summary(evaluation_of([*results, *rows])))


def test_against_bm25(evaluation):
    bm25 = result("bm25", "bm25", None, "bm25", encoder="", quality=[0.9] * 12)
    lost = evaluation_of([bm25, result(quality=[0.5] * 12)])
    assert against_bm25(lost.row_comparisons[1]).startswith("significantly below BM25 (p ")
    assert against_bm25(evaluation.row_comparisons[5]).startswith(
        "below BM25, not significantly (p = "
    )
    assert against_bm25(evaluation.row_comparisons[3]) == ""
