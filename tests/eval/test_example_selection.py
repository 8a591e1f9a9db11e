"""Selection of example queries and of the rows that they compare."""

from pipeline.eval.example_selection import compared_rows, select_queries
from tests.eval.evaluations import evaluation_of, result

FULL = [0.9, 0.9, 0.5, 0.5, 0.1, 0.0, 0.6]
MERGED = [0.1, 0.8, 0.9, 0.5, 0.1, 0.0, 0.9]


def test_lost_won_and_failed():
    full = result("full", "full", None, quality=FULL, vector_bytes=1e5)
    merged = result(quality=MERGED)
    evaluation = evaluation_of([full, merged])
    assert compared_rows(evaluation) == [full, merged]
    assert select_queries(evaluation, [full, merged]) == {
        "q0": "lost",
        "q1": "lost",
        "q2": "won",
        "q6": "won",
        "q5": "failed",
        "q4": "failed",
    }


def test_compares_cheapest_row_that_retains_quality(results):
    assert [r.name for r in compared_rows(evaluation_of(results))] == [
        "full.maxsim",
        "hpool_32.hybrid",
    ]
    without_hybrid = [r for r in results if r.score != "hybrid"]
    assert [r.name for r in compared_rows(evaluation_of(without_hybrid))] == [
        "full.maxsim",
        "hpool_32.maxsim",
    ]


def test_without_compressed_rows(results):
    assert [r.name for r in compared_rows(evaluation_of(results[:3]))] == ["full.maxsim"]
    assert select_queries(evaluation_of(results[:3]), results[2:3]) == {}
    assert compared_rows(evaluation_of(results[:2])) == []
    assert select_queries(evaluation_of(results[:2]), []) == {}
