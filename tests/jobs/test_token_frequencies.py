"""Counting of tokens, and weighted searches on the command line, in evaluations and runs."""

import json
import shutil

import pytest

from jobs import evaluate, search, token_frequencies
from pipeline import open_index
from pipeline.config import SpecError
from pipeline.eval.metrics import read_run

QUERY = "The lift of the wing"


@pytest.fixture(scope="module")
def uri(index_uri, tmp_path_factory) -> str:
    """Copy of the index with token frequencies."""
    uri = str(tmp_path_factory.mktemp("frequencies") / "index")
    shutil.copytree(index_uri, uri)
    token_frequencies.main([uri, "representation=hpool_2"])
    return uri


def test_reports_the_counts(uri, capsys):
    token_frequencies.main([uri, "max_items=3"])
    assert "tokens of 3 items for minilm" in capsys.readouterr().out
    token_frequencies.main([uri])
    assert "tokens of 8 items for minilm" in capsys.readouterr().out


def test_search(uri, tmp_path, capsys):
    search.main([uri, QUERY, "--idf-power", "0.5", "--json", "-k", "2"])
    hits = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = open_index(uri).search(QUERY, k=2, idf_power=0.5)
    assert [hit["score"] for hit in hits] == [hit.score for hit in expected]
    weights = [match["weight"] for match in hits[0]["matches"]]
    assert weights == [match.weight for match in expected[0].matches]
    assert len(set(weights)) > 1

    (tmp_path / "queries.tsv").write_text(f"1\t{QUERY}\n")
    out, queries = str(tmp_path / "run.trec"), str(tmp_path / "queries.tsv")
    search.main([uri, "--queries", queries, "--run", out, "--idf-power", "0.5", "-k", "2"])
    found = read_run(out)["1"]
    assert found == pytest.approx({hit.item_id: hit.score for hit in expected})
    assert "full.maxsim.idf-0.5" in (tmp_path / "run.trec").read_text()


def test_evaluation(uri, tmp_path):
    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "1", "text": QUERY}))
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n1\twing/1\t1\n")
    (folder / "corpus.jsonl").write_text("")
    spec = {
        "index": uri,
        "benchmark": {"name": "beir", "path": str(folder)},
        "output": str(tmp_path / "out"),
        "representations": ["hpool_4"],
        "judged": "item",
        "bm25": False,
        "diagnostics": False,
        "measures": ["nDCG@5"],
        "k": 5,
    }
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec))
    searcher = open_index(uri)
    for power in (None, 1.0, 0.5):
        evaluate.main([str(path), *([] if power is None else [f"idf_power={power}"])])
        run = read_run(str(tmp_path / "out/runs/hpool_4.maxsim.trec"))
        (ranking,) = searcher.rank([QUERY], "hpool_4", k=5, idf_power=power)
        assert run["1"] == pytest.approx(ranking.scores_by_item())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["representation=hpool_9"], r"representation must be one of full"),
        (["max_items=0"], r"max_items must be .* got 0"),
        (["items=3"], r"unknown field 'items'"),
    ],
)
def test_invalid_arguments(uri, arguments, message):
    with pytest.raises(SpecError, match=message):
        token_frequencies.main([uri, *arguments])


def test_requires_texts(tmp_path):
    from tests.search.vectors import rows, write

    write(str(tmp_path / "index"), rows(["a", "b"], [1, 2]))
    with pytest.raises(SpecError, match="idf_power must be null, got 1.0, which needs token freq"):
        search.main([str(tmp_path / "index"), QUERY, "--idf-power", "1"])
