"""Tables of given results."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from pipeline.eval.report.summary import fitting, summary
from pipeline.eval.report.tables import (
    budget,
    comparisons_table,
    metrics_csv,
    paper_csv,
    paper_table,
    per_query_csv,
    query_categories_csv,
    table,
)
from pipeline.eval.significance import randomisation_p
from tests.eval.evaluations import DIAGNOSIS, evaluation_of, result


def test_table(evaluation):
    header, *rows = table(evaluation)
    row = dict(zip(header, rows[3], strict=True))
    p, p_bm25 = row.pop("p"), row.pop("p BM25")
    assert 0 < float(p) <= 1 and 0 < float(p_bm25) <= 1
    assert row == {
        "representation": "hpool_32",
        "method": "hpool",
        "K": "32",
        "score": "maxsim",
        "nDCG@10": "0.4100",
        "AP": "0.2050",
        "retention": "82.0 %",
        "against": "full.maxsim",
        "p random": "-",
        "OSR": "-",
        "used": "-",
        "Gini": "-",
        "pareto": "*",
        "pareto all": "*",
        "vectors/item": "31.5",
        "B/item": "24,192",
        "B/item all": "26,000",
        "queries/s": "1,234.5",
        "ms": "1.50",
        "ms p95": "2.25",
        "MaxSim ops": "-",
    }
    assert [row[2] for row in rows[:3]] == ["-", "1", "all"]
    assert dict(zip(header, rows[0], strict=True))["B/item"] == "-"


def test_text_and_markdown(evaluation):
    cells = table(evaluation)
    lines = cells.text().splitlines()
    assert [line.split() for line in lines[1:]] == [" ".join(row).split() for row in cells[1:]]
    assert len({len(line) for line in lines}) == 1  # the last column is right-aligned
    assert cells.markdown().splitlines()[1] == "| " + " | ".join(["---"] * len(cells[0])) + " |"


def test_diagnostics_and_seeds_in_tables(results):
    seeds = {name: {"nDCG@10": 0.4, "OSR": osr} for name, osr in (("a", 0.7), ("b", 0.8))}
    random = {"name": "random", "num_vectors": 32, "seed": 0}
    row = result("a", "random", compressor=random, diagnosis=DIAGNOSIS, seeds=seeds)
    header, *cells = table(evaluation_of([row, results[3]]))
    rows = dict(zip(header, cells[0], strict=True))
    assert (rows["method"], rows["OSR"]) == ("random (2 seeds)", "0.750")
    assert (rows["used"], rows["Gini"]) == ("50.0 %", "0.400")
    first, second = csv.DictReader(io.StringIO(metrics_csv(evaluation_of([row, results[3]]))))
    values = {
        "OSR": (0.5 + 1 + 0.75) / 3,
        "OSR ratio of means": 6 / 8,
        "OSR pairs": 3,
        "OSR left out": 0,
        "used": 0.5,
        "used_relevant": 0.25,
        "gini": 0.4,
        "cv": 120,
        "similarity_mean": 0.23,
        "num_seeds": 2,
        "nDCG@10 sd": 0,
        "OSR sd": 0.005**0.5,
    }
    assert {name: float(first[name]) for name in values} == pytest.approx(values)
    assert {second[name] for name in values} == {""}


def test_csv_values_are_not_rounded(evaluation):
    rows = list(csv.DictReader(io.StringIO(metrics_csv(evaluation))))
    assert [row["representation"] for row in rows] == [r.representation for r in evaluation.results]
    assert float(rows[2]["queries_per_second"]) == 1234.5
    assert rows[2]["num_vectors"] == rows[2]["p_reference"] == ""
    assert float(rows[3]["retention"]) == evaluation.row_comparisons[3].retention
    assert (rows[3]["pareto"], rows[5]["pareto"]) == ("True", "False")
    assert len(per_query_csv(evaluation).splitlines()) == 1 + 2 * len(rows)


def test_fitting_samples(results):
    full_index = {"num_items": 64, "num_evaluated": 64, "origin": {}}
    separate = {
        "num_items": 1,
        "num_evaluated": 0,
        "origin": {"source": {"name": "text", "path": "some"}},
    }
    index = {"num_items": 9, "num_evaluated": 2, "origin": {"index": "out/a", "filter": "x = 1"}}
    rows = [
        result(f"r{i}", fit_sample=fit_sample)
        for i, fit_sample in enumerate([full_index, separate, index, {}])
    ]
    assert [fitting(row) for row in rows] == [
        "64 items of the index, all of them evaluated",
        "1 item of a separate sample (some), none of them evaluated",
        "9 items of a separate sample (out/a where x = 1), 2 of them evaluated",
        "",
    ]
    sentences = [line for line in summary(evaluation_of(rows)) if line.startswith("Fitted on")]
    assert sentences == [f"Fitted on {fitting(rows[i])}: r{i}." for i in (0, 2)]
    values = list(csv.DictReader(io.StringIO(metrics_csv(evaluation_of(rows)))))
    assert [row["fitted_on"] for row in values] == ["64", "1", "9", ""]
    assert [row["fitted_on_evaluated"] for row in values] == ["64", "0", "2", ""]


def test_quality_by_category(evaluation):
    categories = {"kind": {"plain": ["q0"], "other": ["q1"]}}
    rows = query_categories_csv(replace(evaluation, query_categories=categories)).splitlines()
    assert rows[0] == "row,field,category,num_queries,nDCG@10"
    assert rows[1:3] == ["bm25,kind,plain,1,0.3", "bm25,kind,other,1,0.4"]
    assert len(rows) == 1 + 2 * len(evaluation.results)


def test_two_pareto_fronts():
    rows = [
        result("a", quality=[0.4, 0.4], vector_bytes=10.0, all_bytes=100.0),
        result("b", quality=[0.3, 0.3], vector_bytes=20.0, all_bytes=20.0),
        result("c", quality=[0.2, 0.2], vector_bytes=30.0, all_bytes=200.0),
    ]
    row_comparisons = evaluation_of(rows).row_comparisons
    assert [comparison.pareto for comparison in row_comparisons] == [True, False, False]
    assert [comparison.pareto_all for comparison in row_comparisons] == [True, True, False]


def test_budgets():
    uncompressed = {"name": "none"}
    rows = [
        result(),
        result(num_vectors=None, compressor={"name": "hpool", "ratio": 0.125}),
        result("full8", "full int8", None, compressor=uncompressed),
        result("full", "full", None, compressor=uncompressed),
        result("any", "adaptive_eos", None, compressor={"name": "adaptive_eos", "ratio": None}),
    ]
    assert [budget(r) for r in rows] == ["32", "12.5 %", "100 %", "all", "adaptive"]


def test_planned_comparisons_are_corrected_among_themselves():
    """The other rows of the evaluation do not count."""
    quality = [[0.5 + 0.01 * (q % 3) + 0.002 * row for q in range(12)] for row in range(8)]
    rows = [result(f"r{n}", quality=values) for n, values in enumerate(quality)]
    spec = {**evaluation_of(rows).spec, "comparisons": [["r7.maxsim", "r0.maxsim"]]}
    (planned,) = evaluation_of(rows, spec=spec).planned_comparisons
    assert planned.difference == pytest.approx(0.014) and planned.low > 0
    assert planned.p == randomisation_p(np.full((1, 12), 0.014))[0]
    spec["comparisons"].append(["r6.maxsim", "r0.maxsim"])
    header, first, _ = comparisons_table(evaluation_of(rows, spec=spec))
    assert header == ["row", "against", "nDCG@10 difference", "95 % interval", "p"]
    assert first[:4] == ["r7.maxsim", "r0.maxsim", "+0.0140", "[+0.0140, +0.0140]"]
    both = evaluation_of(rows, spec=spec).planned_comparisons
    assert both[0].p == pytest.approx(2 * planned.p)
    assert evaluation_of(rows).planned_comparisons == []


def test_table_of_a_paper():
    quality = [[0.5 + 0.01 * (q % 3) + 0.01 * row for q in range(12)] for row in range(3)]
    rows = [result(f"r{n}", f"m_{n}", quality=values) for n, values in enumerate(quality)]
    spec = {**evaluation_of(rows).spec, "labels": {"m_2": "100 % ours"}}
    spec["comparisons"] = [["r2.maxsim", "r0.maxsim"], ["r1.maxsim", "r2.maxsim"]]
    evaluation = evaluation_of(rows, spec=spec)
    assert evaluation.better_than["r2.maxsim"] == ["r0.maxsim", "r1.maxsim"]
    lines = paper_table(evaluation).splitlines()
    assert "12 queries" in lines[0] and "the planned comparisons" in lines[2]
    (ours,) = (line for line in lines if "ours" in line)
    assert ours.startswith(
        r"$c$ & 100 \% ours & 32 & 31.5 & 24,192 & 0.530$^{ab}$ {\scriptsize [0.52"
    )
    assert r"$a$ & m\_0 & " in lines[8] and "^" not in lines[8]
    *_, last = csv.DictReader(io.StringIO(paper_csv(evaluation)))
    assert (last["method"], last["better_than"]) == ("100 % ours", "r0.maxsim r1.maxsim")
    assert float(last["nDCG@10 low"]) < float(last["nDCG@10"]) < float(last["nDCG@10 high"])
    many = evaluation_of([result(f"r{n}") for n in range(27)])
    assert "$(27)$ & " in paper_table(many)
