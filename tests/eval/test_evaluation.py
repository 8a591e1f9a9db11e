"""Evaluation of prefixes of a representation, against columns that store only these vectors."""

import json
from dataclasses import replace

import pytest

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.evaluation import run
from pipeline.eval.results import read_results
from pipeline.eval.spec import EvaluateSpec
from pipeline.report.files import write

QUERIES = {"1": "the lift of a wing", "b": "how to bake bread", "h": "heat at the nose of a body"}
QRELS = {"1": "wing", "b": "bread", "h": "heat"}


@pytest.fixture
def spec(nested_uri, tmp_path) -> EvaluateSpec:
    (tmp_path / "qrels").mkdir()
    lines = [f"{query}\t{document}\t1\n" for query, document in QRELS.items()]
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    lines = [json.dumps({"_id": query, "text": text}) + "\n" for query, text in QUERIES.items()]
    (tmp_path / "queries.jsonl").write_text("".join(lines))
    fields = {
        "index": nested_uri,
        "benchmark": {"name": "beir", "path": str(tmp_path)},
        "output": str(tmp_path / "out"),
        "representations": ["full", "nested_8", "nested_8@3", "nested_3"],
        "scores": ["maxsim", "hybrid"],
        "bm25": False,
    }
    return config.parse(EvaluateSpec, fields)


def test_prefix_rows_equal_smaller_columns(spec):
    run(spec.model_copy(update={"representations": ["full", "nested_8"]}), lambda line: None)
    evaluation = run(spec, lambda line: None)  # with the other rows in the cache
    for score in ("maxsim", "hybrid"):
        whole, prefix, smaller = (
            evaluation.row(f"{name}.{score}") for name in ("nested_8", "nested_8@3", "nested_3")
        )
        assert (whole.num_vectors, prefix.num_vectors) == (8, 3)
        assert prefix.vectors_per_item < whole.vectors_per_item
        costs = {
            name: getattr(prefix, name) for name in ("queries_per_second", "median_ms", "p95_ms")
        }
        assert replace(smaller, representation="nested_8@3", **costs) == prefix
        assert (prefix.diagnosis is None) == (score == "hybrid")
    write(evaluation, spec.output)
    assert read_results(spec.output, "evaluation").row("nested_8@3.maxsim").num_vectors == 3


def test_prefix_of_other_representations(spec):
    other = spec.model_copy(update={"representations": ["hpool_4@2"]})
    with pytest.raises(SpecError, match="^representation must be .*stores no nested vectors$"):
        run(other, lambda line: None)
