"""Recommendations: as a user runs the job, and its errors."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import yaml

from jobs import plan
from pipeline import config
from pipeline.config import SpecError
from pipeline.index.columns import all_representations
from pipeline.index.recompress import RecompressSpec

pytestmark = pytest.mark.usefixtures("blank_figures")

SWEEP = ("--methods", "none", "hpool", "--budgets", "2", "4", "--codecs", "float16", "int8")


@pytest.fixture
def benchmark(tmp_path):
    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    qrels = "query-id\tcorpus-id\tscore\n1\twing\t1\nb\tbread\t2\n2\theat\t1\n"
    (folder / "qrels/test.tsv").write_text(qrels)
    texts = {"1": "the lift of a wing", "b": "how to bake bread", "2": "heat of a body"}
    lines = [json.dumps({"_id": name, "text": text}) + "\n" for name, text in texts.items()]
    (folder / "queries.jsonl").write_text("".join(lines))
    return str(folder)


def test_without_queries(index_uri, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = (index_uri, *SWEEP, "--max-milliseconds", "60000", "--out", str(out))
    plan.main(("recommend", *arguments, "--retain", "0.5"))
    printed = capsys.readouterr().out
    assert "6 candidates, 8 of 8 items, 8 pseudo-queries" in printed
    assert "is the smallest candidate that retains at least 50.0 %" in printed
    result = json.loads((out / "recommendation.json").read_text())
    assert result["violations"] == [] and not result["is_judged"]
    rows = {row["name"]: row for row in csv.DictReader((out / "candidates.csv").open())}
    names = {"full", "full_int8", "hpool_2", "hpool_2_int8", "hpool_4", "hpool_4_int8"}
    assert rows.keys() == names
    assert float(rows["full"]["retained"]) == 1 and float(rows["full"]["max_distance"]) < 1e-3
    assert (out / "recommendation.png").read_bytes().startswith(b"\x89PNG")
    spec = config.load(RecompressSpec, str(out / "recompress.yaml"))
    assert [r.id for r in all_representations(spec)] == [result["recommended"]]
    assert f"maxray add representations {out}/recompress.yaml" in printed

    plan.main(("recommend", *arguments, "--retain", "0.5"))  # deterministic, except for the times
    again = json.loads((out / "recommendation.json").read_text())
    for row in (*result["candidates"], *again["candidates"]):
        row.pop("milliseconds")
    assert again["candidates"] == result["candidates"]


def test_with_judged_queries(index_uri, benchmark, tmp_path, capsys):
    evaluation = tmp_path / "evaluate.yaml"
    fields = {"index": index_uri, "benchmark": {"name": "beir", "path": benchmark}, "output": "x"}
    evaluation.write_text(yaml.safe_dump(fields))
    arguments = (index_uri, *SWEEP, "--queries", str(evaluation), "--validate")
    plan.main(("recommend", *arguments, "--out", str(tmp_path / "out")))
    printed = capsys.readouterr().out
    assert "3 judged queries" in printed and "half of the queries" in printed
    rows = list(csv.DictReader((tmp_path / "out/validation.csv").open()))
    assert [row["estimate"] for row in rows] == ["pseudo-queries", *["half of the queries"] * 2]

    plan.main(("recommend", index_uri, *SWEEP, "--queries", benchmark, "--max-bytes", "1"))
    printed = capsys.readouterr().out
    assert "No candidate meets all requirements. The closest is hpool_2_int8" in printed
    assert "more bytes per item than allowed (max_bytes)" in printed
    assert "save this spec as recompress.yaml" in printed


def test_stored_representation_is_not_added_again(index_uri, tmp_path, capsys):
    arguments = ("--methods", "hpool", "--budgets", "4", "--codecs", "float16", "--retain", "0.1")
    plan.main(("recommend", index_uri, *arguments, "--out", str(tmp_path / "out")))
    printed = capsys.readouterr().out
    assert "The index already stores it as hpool_4." in printed
    assert "maxray add" not in printed and not (tmp_path / "out/recompress.yaml").exists()
    result = json.loads((tmp_path / "out/recommendation.json").read_text())
    assert (result["stored_as"], result["recompress"]) == ("hpool_4", None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--representation", "ful"], "representation must be .* did you mean 'full'"),
        (["--representation", "hpool_4"], "an uncompressed representation, got 'hpool_4'"),
        (["--methods", "hpol"], "methods must be .* did you mean 'hpool'"),
        (["--codecs", "int9"], r"codecs\[0\]"),
        (["--retain", "0"], "retain must be .* got 0.0"),
        (["--retain", "1.5"], "retain must be .* got 1.5"),
        (["--budgets", "4", "0"], r"budgets\[1\] must be .* got 0"),
        (["--max-bytes", "0"], "max_bytes must be .* got 0.0"),
        (["--max-bytes", "inf"], "max_bytes must be .* got inf"),
        (["--queries", __file__], "--queries must be a BEIR folder or a spec of jobs.evaluate"),
        (["--filter", "parent_id = 'gone'"], "has none"),
        (["--queries", "/nowhere"], "--queries must be .* got '/nowhere'"),
    ],
)
def test_invalid_input(index_uri, arguments, message):
    with pytest.raises(SpecError, match=message):
        plan.main(("recommend", index_uri, *arguments))


def test_benchmark_of_another_index(index_uri, benchmark, tmp_path):
    folder = shutil.copytree(benchmark, tmp_path / "other")
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n1\tgone\t1\n")
    with pytest.raises(SpecError, match="has none of the 1 judged ids"):
        plan.main(("recommend", index_uri, "--queries", str(folder)))


def test_missing_index_and_options():
    with pytest.raises(SpecError, match="index must be"):
        plan.main(
            (
                "recommend",
                "/nowhere/index",
            )
        )
