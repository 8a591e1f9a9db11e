"""Evaluation of prefixes of a representation, against columns that store only these vectors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.evaluation import run
from pipeline.eval.metrics import read_run
from pipeline.eval.report.files import write
from pipeline.eval.results import read_results
from pipeline.eval.spec import EvaluateSpec
from pipeline.registry import COMPRESSORS
from tests.conftest import ROOT, write_index

pytestmark = pytest.mark.usefixtures("blank_figures")

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


def test_queries_that_are_documents_are_removed_from_their_rankings(nested_uri, tmp_path, texts):
    """k hits remain in every row, and in the examples."""
    judged = {"wing/1": "wing/2", "heat/2": "heat/1"}
    (tmp_path / "qrels").mkdir()
    lines = [f"{query}\t{document}\t1\n" for query, document in judged.items()]
    (tmp_path / "qrels/test.tsv").write_text("".join(lines))
    queries = {**{query: texts[query] for query in judged}, "other": "heat"}
    lines = [json.dumps({"_id": query, "text": text}) + "\n" for query, text in queries.items()]
    (tmp_path / "queries.jsonl").write_text("".join(lines))

    def evaluate(**benchmark):
        fields = {
            "index": nested_uri,
            "benchmark": {"name": "beir", "path": str(tmp_path), **benchmark},
            "output": str(tmp_path / "out"),
            "representations": ["full"],
            "judged": "item",
            "candidates": [{"generator": "single", "num_candidates": [3]}],
            "measures": ["nDCG@3"],
            "k": 3,
            "diagnostics": False,
        }
        return run(config.parse(EvaluateSpec, fields), lambda line: None)

    evaluation = evaluate()
    names = [result.name for result in evaluation.results]
    assert len(names) == 5 and "bm25" in names
    for name in names:
        for query, scores in read_run(str(tmp_path / f"out/runs/{name}.trec")).items():
            assert query not in scores
            assert len(scores) == 3 or name == "bm25"  # few texts share a word with the query
    assert evaluation.row("full.maxsim").means["nDCG@3"] == 1
    (note,) = (note for note in evaluation.notes if "ignore_identical_ids" in note)
    assert note.startswith("2 queries have the id of a document")
    for example in evaluation.examples:
        for hits in example.hits.values():
            assert example.query_id not in [hit.document_id for hit in hits]

    evaluation = evaluate(ignore_identical_ids=False)
    assert next(iter(read_run(str(tmp_path / "out/runs/full.maxsim.trec"))["wing/1"])) == "wing/1"
    assert not any("ignore_identical_ids" in note for note in evaluation.notes)


def test_ids_that_no_document_has_leave_cache_keys_unchanged(spec):
    fields = spec.benchmark.model_copy(update={"ignore_identical_ids": False})
    other = spec.model_copy(update={"benchmark": fields, "representations": ["full"]})
    evaluation = run(other, lambda line: None)
    lines = []
    again = run(spec.model_copy(update={"representations": ["full"]}), lines.append)
    assert again.judgments == evaluation.judgments
    assert sum("(cached)" in line for line in lines) == 2


def test_representations_of_packages_that_are_not_installed(spec, tmp_path, monkeypatch):
    """They are left out with a note, or refused at the start if the spec names them."""
    uri, first_last = str(tmp_path / "index"), {"name": "first_last", "num_vectors": 4}
    monkeypatch.syspath_prepend(str(ROOT / "examples/custom_compressor"))
    monkeypatch.setitem(COMPRESSORS._all, "first_last", "maxray_first_last:FirstLast")
    write_index(uri, [{"compressor": "none"}, {"compressor": first_last}])
    spec = spec.model_copy(update={"index": uri, "representations": []})
    assert len(run(spec, lambda line: None).results) == 4

    monkeypatch.delitem(COMPRESSORS._all, "first_last")
    problem = "needs the compressor 'first_last', which no installed package provides"
    evaluation = run(spec, lambda line: None)
    assert [result.name for result in evaluation.results] == ["full.maxsim", "full.hybrid"]
    assert f"no rows for first_last_4: it {problem}" in evaluation.notes
    named = spec.model_copy(update={"representations": ["full", "first_last_4"]})
    with pytest.raises(
        SpecError, match=rf"^representations must be .*, got 'first_last_4', which {problem}$"
    ):
        run(named, lambda line: None)

    monkeypatch.setitem(COMPRESSORS._all, "first_last", "nowhere_to_be_found:FirstLast")
    (note,) = (n for n in run(spec, lambda line: None).notes if "no rows for" in n)
    assert note.endswith("which needs the missing module 'nowhere_to_be_found'")


def test_grounding_needs_maxsim_rows(spec):
    fields = {**config.dump(spec), "scores": ["single_vector"], "grounding": {"num_phrases": 3}}
    notes = run(config.parse(EvaluateSpec, fields), lambda line: None).notes
    assert "no grounding: no row has the score maxsim" in notes


def test_planned_comparisons(spec):
    comparisons = [["nested_8@3.maxsim", "full.maxsim"], ["nested_3.hybrid", "nested_8.hybrid"]]
    planned = config.parse(EvaluateSpec, {**config.dump(spec), "comparisons": comparisons})
    evaluation = run(planned, lambda line: None)
    assert [[c.row, c.other] for c in evaluation.planned_comparisons] == comparisons
    for comparison in evaluation.planned_comparisons:
        means = [evaluation.row(n).means["nDCG@10"] for n in (comparison.row, comparison.other)]
        assert comparison.difference == pytest.approx(means[0] - means[1])
        assert comparison.low <= comparison.difference <= comparison.high
    paths = write(evaluation, spec.output)
    assert {"comparisons.md", "comparisons.csv"} <= {path.rpartition("/")[2] for path in paths}
    folder = Path(spec.output)
    assert "<h3>Planned comparisons</h3>" in (folder / "report.html").read_text("utf-8")
    stored = json.loads((folder / "results.json").read_text("utf-8"))
    assert stored["comparisons"][1]["row"] == "nested_3.hybrid"
    again = read_results(spec.output, "evaluation")
    assert again.planned_comparisons == evaluation.planned_comparisons


def test_planned_comparisons_of_unknown_rows_are_refused_before_scoring(spec):
    planned = spec.model_copy(update={"comparisons": [["full.maxsim", "nested_8.maxim"]]})
    with pytest.raises(
        SpecError, match=r"^comparisons\[0\] must be one of .* did you mean 'nested_8"
    ):
        run(planned, lambda line: None)
    assert not list(Path(spec.output).glob("entries/*"))
    for pairs, problem in (
        ([["a"]], "a pair of two different rows, got \\['a'\\]"),
        ([["a", "a"]], "a pair of two different rows"),
        ([["a", "b"], ["b", "a"]], "a unique pair, got \\['a', 'b'\\], which occurs twice"),
    ):
        with pytest.raises(SpecError, match=f"^comparisons must be {problem}"):
            config.parse(EvaluateSpec, {**config.dump(spec), "comparisons": pairs})
