"""Numbers of evaluations in the units of papers."""

from __future__ import annotations

import pytest

from examples.papers.tables.plan import Cell
from examples.papers.tables.values import cell_interval, cell_value, other_gain_value
from pipeline.config import SpecError
from pipeline.eval.results import Evaluation, Result


@pytest.fixture
def output(tmp_path) -> str:
    """Output folder of an evaluation of two representations."""
    results = [
        Result(
            name, method, None, score, "", {"q": {"R@1": value}, "r": {"R@1": 0.0}}, vectors,
            256.0 * vectors, 0.0, 4.0, 2.5, 0.0, maxsim_ops=3e12, rerank={"parameters": 33_000_000},
            grounding={"box_mass": 0.5, "region_hit": 0.4, "coverage_iou": 0.3},
        )
        for name, method, score, value, vectors in (
            ("full", "full", "maxsim", 0.8, 100.0),
            ("hpool_8", "hpool", "maxsim", 0.6, 8.0),
            ("single_vector", "single_vector", "single_vector", 0.4, 1.0),
        )
    ]  # fmt: skip
    evaluation = Evaluation({"benchmark": {"name": "beir"}}, "R@1", "", 9, [], "", {}, results)
    (tmp_path / "results.json").write_text(evaluation.to_json(), "utf-8")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("R@1", 30.0),
        ("BoxMass", 50.0),
        ("relative R@1", 75.0),
        ("vectors", 8.0),
        ("kilobytes", 2.048),
        ("GB per million", 2.048),
        ("10^12 MaxSim operations", 3.0),
        ("queries/s", 4.0),
        ("seconds", 0.5),
        ("ms per query", 2.5),
        ("million parameters", 33.0),
    ],
)
def test_measures(output, measure, expected):
    cell = Cell(output, {"representation": "hpool_8", "measure": measure})
    assert cell_value([cell], percent=True) == pytest.approx(expected)


def test_means_and_fractions(output):
    cells = [
        Cell(output, {"representation": name, "measure": "R@1"}) for name in ("full", "hpool_8")
    ]
    assert cell_value(cells, percent=False) == pytest.approx(0.35)
    assert cell_value([], percent=False) is None
    single = Cell(output, {"score": "single_vector", "measure": "R@1"})
    assert cell_value([single], percent=False) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"representation": "hpol_8", "measure": "R@1"}, "did you mean 'hpool_8.maxsim'?"),
        ({"representation": "full", "measure": "R@2"}, "measure must be one of R@1, BoxMass"),
    ],
)
def test_errors(output, selection, message):
    with pytest.raises(SpecError) as caught:
        cell_value([Cell(output, selection)], percent=True)
    assert message in str(caught.value)


def test_intervals_are_of_means_over_queries(output):
    def interval(measure, *names):
        cells = [Cell(output, {"representation": n, "measure": measure}) for n in names]
        return cell_interval(cells, percent=True)

    assert interval("R@1", "full") == (0.0, pytest.approx(80.0))  # of two queries
    low, high = interval("R@1", "full", "hpool_8")
    assert low == 0.0 and high == pytest.approx(70.0)
    assert interval("relative R@1", "hpool_8") == (pytest.approx(75.0), 100.0)
    assert interval("bytes", "full") is None and interval("BoxMass", "full") is None
    assert cell_interval([], percent=True) is None


def test_other_gain(output):
    cell = Cell(output, {"representation": "full", "measure": "R@1"})
    assert other_gain_value([cell], percent=True) is None
    ndcg = Cell(output, {"representation": "full", "measure": "nDCG@5"})
    assert other_gain_value([ndcg], percent=True) is None  # the evaluation was made without it
