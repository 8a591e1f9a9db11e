"""Budgets by the number of tokens, and recommendations, from evaluations."""

import doctest
import json
import re

import numpy as np
import pytest
import torch

from examples.collection import budgets, defaults
from examples.collection.__main__ import main
from pipeline.config import SpecError


def test_levels():
    assert doctest.testmod(budgets).attempted == 1
    lengths_B = np.array([4, 16, 64, 256])
    equal = budgets.levels(lengths_B, 0.0, 8, 2)
    assert equal.tolist() == [8, 8, 8, 8]
    for power in budgets.POWERS.values():
        found = budgets.levels(lengths_B, power, 8, 4)
        assert np.minimum(found, lengths_B).sum() <= 28
    assert budgets.levels(lengths_B, 1.0, 8, 2).tolist() == [4, 4, 4, 16]
    assert budgets.levels(lengths_B, 1.0, 4, 4).tolist() == [1, 1, 4, 8]


def test_scores_of_the_budget_of_an_item():
    runs = {
        4: {"q": {f"item{i}": 10.0 - i for i in range(12)}},
        8: {"q": {f"item{i}": 11.5 - i for i in range(11, -1, -1)}},
    }
    by_item = {f"item{i}": 8 if i == 3 else 4 for i in range(12)}
    run, share = budgets.mixed(runs, by_item)
    assert list(run["q"])[:4] == ["item0", "item1", "item3", "item2"]
    assert run["q"]["item3"] == 8.5 and len(run["q"]) == 10 and share == 1
    cut = {4: runs[4], 8: {"q": {"item3": 8.5}}}
    assert budgets.mixed(cut, by_item)[1] == 0


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
        budgets.main(["tokens", str(tmp_path)])


def test_properties_of_an_item():
    tokens_ND = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    found = budgets._properties(tokens_ND, tokens_ND[[0, 2]])
    assert found["number of tokens"] == 4 and found["Gini of group sizes"] == 0
    assert found["mean distance"] == pytest.approx(0.05)
    assert found["radius"] == pytest.approx(0.2)
    # The means are (1, 0) and (0.3, 0.9), and that of all tokens is (0.65, 0.45).
    assert found["unexplained variance"] == pytest.approx(0.2 / 1.5)
