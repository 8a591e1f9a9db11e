"""Pooling of evaluations of several collections."""

import csv
from dataclasses import replace

import pytest

from jobs import evaluate
from pipeline.config import SpecError
from pipeline.eval.pooled import pool, query_retention
from pipeline.eval.report.tables import pooled_table
from tests.eval.evaluations import DIAGNOSIS, evaluation_of, result

#: OSR by method in three collections; sap is higher than random in all 12 pairs.
RETENTION = {"sap": (0.8, 0.7, 0.9), "random": (0.5, 0.6, 0.4), "eos": (0.5, 0.6, 0.4)}


def diagnosed(share: float):
    """Returns the diagnosis of four queries, the last with two relevant items."""
    pairs = {f"q{i}": [[share, 1.0]] for i in range(3)}
    return replace(DIAGNOSIS, pairs={**pairs, "q3": [[share * 2.0, 2.0], [share * 9.0, 9.0]]})


@pytest.fixture
def outputs(tmp_path) -> list[str]:
    for i in range(3):
        rows = [
            result(
                f"{name}_8",
                name,
                8,
                diagnosis=diagnosed(values[i]),
                compressor={"name": name},
                quality=[0.1 * i] * 4,
            )
            for name, values in RETENTION.items()
        ]
        rows += [result(f"only_{i}")]
        (tmp_path / str(i)).mkdir()
        evaluation = evaluation_of(rows, judgments=f"j{i}", num_items=10)
        (tmp_path / str(i) / "results.json").write_text(evaluation.to_json())
    return [str(tmp_path / str(i)) for i in range(3)]


def test_means_and_spread_over_collections(outputs):
    pooled = pool(outputs)
    assert {row.name for row in pooled.results} == {
        "sap_8.maxsim",
        "random_8.maxsim",
        "eos_8.maxsim",
    }
    assert (pooled.num_queries, pooled.num_items) == (12, 30)
    row = pooled.row("sap_8.maxsim")
    assert row.retention.mean == pytest.approx(0.8)
    assert row.spread("OSR") == pytest.approx(0.1)
    assert row.means["nDCG@10"] == pytest.approx(0.1)
    assert row.spread("nDCG@10") == pytest.approx(0.1)
    assert query_retention(row)["1 q3"] == pytest.approx(0.7)


def test_significance_over_all_queries(outputs):
    header, *rows = pooled_table(pool(outputs), ["random", "eos"])
    by_method = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert float(by_method["sap"]["p random"]) < 0.01  # the sign of 12 differences
    assert (by_method["eos"]["p random"], by_method["random"]["p random"]) == ("1.000", "-")
    assert (by_method["sap"]["OSR"], by_method["sap"]["OSR ±"]) == ("0.800", "0.100")


def test_job_writes_and_prints_table(outputs, tmp_path, capsys):
    out = tmp_path / "out"
    evaluate.main(["pool", *outputs, "--output", str(out), "--against", "eos"])
    assert "p eos" in capsys.readouterr().out
    with (out / "pooled.csv").open() as file:
        assert {row["method"] for row in csv.DictReader(file)} == set(RETENTION)
    assert (out / "diagnostics_quality.png").read_bytes().startswith(b"\x89PNG")


def test_invalid_combinations(outputs, tmp_path):
    with pytest.raises(
        SpecError,
        match="^OUT must be an evaluation of another collection, got .* has the judged queries of",
    ):
        pool([*outputs, outputs[0]])
    with pytest.raises(SpecError, match="^against must be .*'nothing'"):
        pooled_table(pool(outputs), ["nothing"])
    (tmp_path / "other").mkdir()
    other = evaluation_of([result("other")], judgments="j9")
    (tmp_path / "other/results.json").write_text(other.to_json())
    with pytest.raises(SpecError, match="evaluations with a common row"):
        pool([outputs[0], str(tmp_path / "other")])
