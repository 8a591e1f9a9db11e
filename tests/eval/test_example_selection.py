"""Which queries are worth reading, and which two rows they show."""

from pipeline.eval.example_selection import choose, compared
from tests.eval.evaluations import evaluation_of, result

FULL = [0.9, 0.9, 0.5, 0.5, 0.1, 0.0, 0.6]
MERGED = [0.1, 0.8, 0.9, 0.5, 0.1, 0.0, 0.9]


def test_lost_won_and_failed():
    full = result("full", "full", None, quality=FULL, vector_bytes=1e5)
    merged = result(quality=MERGED)
    evaluation = evaluation_of([full, merged])
    assert compared(evaluation) == [full, merged]
    assert choose(evaluation, [full, merged]) == {
        "q0": "lost",
        "q1": "lost",
        "q2": "won",
        "q6": "won",
        "q5": "failed",
        "q4": "failed",
    }


def test_the_compressed_row_is_the_cheapest_that_keeps_the_quality(results):
    assert [r.name for r in compared(evaluation_of(results))] == ["full.late", "hpool_32.hybrid"]
    poor = [r for r in results if r.score != "hybrid"]
    assert [r.name for r in compared(evaluation_of(poor))] == ["full.late", "hpool_32.late"]


def test_without_a_compressed_row_one_stands_alone(results):
    assert [r.name for r in compared(evaluation_of(results[:3]))] == ["full.late"]
    assert choose(evaluation_of(results[:3]), results[2:3]) == {}
    assert compared(evaluation_of(results[:2])) == []
    assert choose(evaluation_of(results[:2]), []) == {}
