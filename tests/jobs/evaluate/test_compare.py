"""Comparisons of evaluations given by hand."""

import csv

import pytest

from jobs import evaluate
from pipeline.config import SpecError
from tests.eval.evaluations import evaluation_of, result


def write(folder, evaluation) -> str:
    folder.mkdir()
    (folder / "results.json").write_text(evaluation.to_json(), encoding="utf-8")
    return str(folder)


@pytest.fixture
def outputs(tmp_path):
    full = result("full", "full", None, quality=[0.5] * 8)
    a = evaluation_of([full, result(quality=[0.2] * 8), result("old", quality=[0.1] * 8)])
    b = evaluation_of([full, result(quality=[0.3] * 8), result("new", quality=[0.4] * 8)])
    return write(tmp_path / "a", a), write(tmp_path / "b", b)


def test_rows_side_by_side(outputs, tmp_path, capsys):
    evaluate.main(["compare", *outputs, "--output", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["row", "nDCG@10", "A", "B", "B", "-", "A", "p"]
    assert lines[1].split() == ["full.maxsim", "0.5000", "0.5000", "+0.0000", "1.000"]
    assert lines[2].split()[:4] == ["hpool_32.maxsim", "0.2000", "0.3000", "+0.1000"]
    assert 0.005 < float(lines[2].split()[4]) < 0.03  # 2 of 256 choices of signs, and two tests
    assert lines[3:5] == [f"only in {outputs[0]}: old.maxsim", f"only in {outputs[1]}: new.maxsim"]

    with (tmp_path / "out/compare.csv").open() as file:
        rows = {(row["row"], row["measure"]): row for row in csv.DictReader(file)}
    assert len(rows) == 2 * 4
    assert float(rows["hpool_32.maxsim", "AP"]["difference"]) == pytest.approx(0.05)
    assert rows["new.maxsim", "AP"]["a"] == ""
    assert float(rows["new.maxsim", "AP"]["b"]) == pytest.approx(0.2)
    page = (tmp_path / "out/compare.html").read_text()
    assert "<script" not in page and "Only in" in page and "+0.1000" in page


def test_writes_nothing_without_output(outputs, tmp_path):
    evaluate.main(["compare", *outputs])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (evaluation_of([result()], judgments="j2"), "has other judged queries \\(some\\)"),
        (evaluation_of([result("b")]), "has no such row"),
        (evaluation_of([result(values={"q0": {"R@7": 1.0}})]), "has no such measure"),
    ],
)
def test_rejects_incomparable_evaluations(outputs, tmp_path, other, problem):
    with pytest.raises(SpecError, match=f"^OUT_B must be .*, got .*, which {problem}") as caught:
        evaluate.main(["compare", outputs[0], write(tmp_path / "other", other)])
    assert "\n" not in str(caught.value)


def test_rejects_folder_without_evaluation(outputs, tmp_path):
    with pytest.raises(SpecError, match=r"^OUT_A must be .*contains no results\.json"):
        evaluate.main(["compare", str(tmp_path / "nowhere"), outputs[1]])
