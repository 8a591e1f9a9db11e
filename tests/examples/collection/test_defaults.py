"""Choices and recommendations from studies, and tables of evaluations."""

import json
import re

import numpy as np
import pytest

from examples.collection import defaults
from examples.collection.__main__ import main
from pipeline.config import SpecError


def test_regrets():
    chosen_RQ = np.array([[1.0, 1.0], [0.97, 0.97], [0.8, 0.8]])
    proved_RQ = np.array([[0.5, 1.0], [0.45, 0.9], [0.75, 0.75]])
    found = list(defaults._regrets(chosen_RQ, proved_RQ, np.array([8.0, 2.0, 1.0]), share=0.95))
    # The last one, which is worse on the first half, is level with the reference on the second.
    assert [ratio for _, ratio in found] == [2, 2, 8]
    assert np.allclose([lost for lost, _ in found], [0, 5, 0])


def test_recommendations_and_comparisons_of_a_study(tmp_path, capsys):
    rng = np.random.default_rng(0)
    queries = [{"_id": f"q{i}", "kind": "heading", "language": "en"} for i in range(80)]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    lines = [f"q{i},{'prove' if i % 2 else 'choose'},{i}" for i in range(80)]
    rows = {"full_int8": 0.5, "kcenter_32_int8": 0.46, "kcenter_8_int8": 0.4, "single_vector": 0.3}
    names = [row if row == "single_vector" else f"{row}.maxsim" for row in rows]
    for number, name in enumerate(("first", "second")):
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True)
        (folder / "queries.csv").write_text("\n".join(["query,half,tokens", *lines]))
        values_RQ = np.array([value + rng.uniform(-0.01, 0.01, 80) for value in rows.values()])
        sizes = [800, 80, 20, 8]
        np.savez(folder / "all.npz", names=names, bytes=sizes, values=values_RQ + 0.1 * number)
    first = {"index": "none", "benchmark": {"name": "beir", "path": str(tmp_path)}, "halves": True}
    spec = {
        "output": str(tmp_path / "out"),
        "collections": {"first": first, "second": {**first, "against": "first"}},
        "fusions": {},
        "grids": [],
    }
    (tmp_path / "study.yaml").write_text(json.dumps(spec))
    main(["regret", str(tmp_path / "study.yaml")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "6 cases" and len(lines) == 10
    assert all(line.split(" | ")[2] == "100 %" for line in lines[4:])
    main(["defaults", str(tmp_path / "study.yaml")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "With all conditions: `kcenter_32_int8.maxsim`"
    (line,) = [line for line in lines if line.startswith("| second | 40 | 0.50")]
    assert re.search(r"0\.(499|500|501), 0\.(599|600|601) \(\+9\.\d to \+10\.\d\)", line)
    with pytest.raises(SpecError, match=r"has no per_query\.csv"):
        main(["table", str(tmp_path)])
