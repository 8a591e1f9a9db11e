"""Choice of a candidate."""

import pytest

from pipeline.eval.recommend.choose import Target, choose
from tests.eval.recommend.vectors import row

ROWS = [
    row("tiny", 100, 0.5),
    row("small", 200, 0.96),
    row("small_better", 201, 0.97),
    row("slow", 150, 0.99, milliseconds=90.0),
    row("large", 900, 0.999),
]


@pytest.mark.parametrize(
    "target, name, violations",
    [
        (Target(0.95), "slow", []),
        (Target(0.95, max_milliseconds=50), "small_better", []),  # same size, higher bound
        (Target(0.99, max_milliseconds=50), "large", []),
        (Target(0.99, 500, 50), "small_better", ["retain"]),
        (Target(0.4, 50), "tiny", ["max_bytes"]),
        (Target(0.9, 50, 0.5), "tiny", ["retain", "max_bytes", "max_milliseconds"]),
    ],
)
def test_smallest_row_that_meets_the_requirements(target, name, violations):
    choice = choose(ROWS, target)
    assert (choice.row.name, choice.violations) == (name, violations)
