"""The search job: as a user runs it, and its options."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import search
from pipeline import open_index
from pipeline.config import SpecError
from pipeline.eval.metrics import read_run
from pipeline.index.writer import IndexWriter

TEXTS = {"1": "the lift of a wing", "b": "how to bake bread"}


@pytest.fixture
def query_file(tmp_path) -> str:
    lines = [json.dumps({"_id": query_id, "text": text}) for query_id, text in TEXTS.items()]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "queries.jsonl")


def run_as_user(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jobs", "search", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_hits_as_a_user_sees_them(index_uri):
    done = run_as_user(index_uri, "slipstream", "--k", "2")
    assert (done.returncode, done.stderr) == (0, "")
    first, snippet, *_ = done.stdout.splitlines()
    rank, score, item_id, *title = first.split()
    expected = open_index(index_uri).search("slipstream", k=2)[0]
    assert (rank, item_id, " ".join(title)) == ("1", expected.item_id, expected.title)
    assert float(score) == pytest.approx(expected.score, abs=1e-4)
    assert "[slipstream]" in snippet.lower()


def test_a_user_error_is_one_sentence_and_exit_code_2(index_uri):
    done = run_as_user(index_uri, "wing", "--representation", "hpool_99")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: representation: 'hpool_99' is not in the index;"
        " legal: full, hpool_4, hpool_2, random_4\n"
    )


@pytest.mark.parametrize("group_by", [[], ["--group-by", "parent"]])
def test_run_over_a_file(index_uri, query_file, tmp_path, group_by, capsys):
    out = str(tmp_path / "out" / "hybrid.trec")
    how = ["--representation", "hpool_4", "--score", "hybrid", "--k", "3", *group_by]
    search.main([index_uri, "--queries", query_file, "--run", out, *how])
    options = {"k": 3, "score": "hybrid", "group_by": "parent" if group_by else None}
    rankings = open_index(index_uri).rank(list(TEXTS.values()), "hpool_4", **options)
    assert read_run(out) == {
        query_id: pytest.approx(
            dict(
                zip(
                    ranking.parent_ids if group_by else ranking.item_ids,
                    ranking.scores,
                    strict=True,
                )
            )
        )
        for query_id, ranking in zip(TEXTS, rankings, strict=True)
    }
    assert capsys.readouterr().out == f"2 queries, 6 hits: {out}\n"


def test_many_queries_without_a_run_are_printed(index_uri, query_file, capsys):
    search.main([index_uri, "--queries", query_file, "--k", "1"])
    printed = capsys.readouterr().out
    assert "1: the lift of a wing\n  1  " in printed
    assert "b: how to bake bread\n  1  " in printed


def test_query_vectors(index_uri, tmp_path, capsys):
    texts = list(TEXTS.values())
    ready = open_index(index_uri).queries(texts)
    np.save(tmp_path / "one.npy", ready.tokens[0].numpy())
    vectors = [tokens.tolist() for tokens in ready.tokens]
    pq.write_table(pa.table({"id": list(TEXTS), "vectors": vectors}), tmp_path / "two.parquet")
    search.main([index_uri, texts[0]])
    by_text = capsys.readouterr().out
    search.main([index_uri, "--query-vectors", str(tmp_path / "one.npy")])
    assert capsys.readouterr().out == by_text

    out = str(tmp_path / "two.trec")
    search.main([index_uri, "--query-vectors", str(tmp_path / "two.parquet"), "--run", out])
    hits = dict(zip(TEXTS, open_index(index_uri).search(texts), strict=True))
    assert {query_id: list(scores) for query_id, scores in read_run(out).items()} == {
        query_id: [hit.item_id for hit in found] for query_id, found in hits.items()
    }


def test_where_and_no_hits(index_uri, capsys):
    search.main([index_uri, "wing", "--where", "parent_id = 'bread'"])
    heads = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("     ")]
    assert {line.split()[2] for line in heads} == {"bread/1", "bread/2"}
    search.main([index_uri, "wing", "--where", "parent_id = 'none'"])
    assert capsys.readouterr().out == "no hits\n"


def test_a_failed_run_leaves_no_file(index_uri, tmp_path):
    (tmp_path / "queries.tsv").write_text("1\twing\n2\t \n")
    with pytest.raises(SpecError, match="stands in line 2"):
        search.main([index_uri, "--queries", str(tmp_path / "queries.tsv"), "--run", str(tmp_path)])
    with pytest.raises(SpecError, match="is a folder; legal: the path of a file"):
        search.main([index_uri, "wing", "--run", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["queries.tsv"]


def test_options_stand_anywhere_and_words_need_no_quotes(index_uri, capsys):
    search.main([index_uri, "the lift of a wing", "--k", "2"])
    expected = capsys.readouterr().out
    search.main(["--k", "2", index_uri, "the", "lift", "--score", "late", "of", "a", "wing"])
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("asked", [[], ["wing", "--queries", "queries.tsv"]])
def test_one_way_to_ask(index_uri, asked, capsys):
    with pytest.raises(SystemExit) as exit:
        search.main([index_uri, *asked])
    assert exit.value.code == 2
    assert capsys.readouterr().err == (
        "error: one of QUERY, --queries and --query-vectors is needed, and only one; see --help\n"
    )


def test_versions_that_cannot_be_searched(index_uri, tmp_path):
    sentence = r"^version: 999 is not a version of the index; legal: 1 to \d+, as far as"
    with pytest.raises(SpecError, match=sentence):
        search.main([index_uri, "wing", "--version", "999"])
    IndexWriter(str(tmp_path / "empty"), "a-job").release()
    sentence = "^index: '.*' has none in version 1; legal: an index, or a version of it, with"
    with pytest.raises(SpecError, match=sentence):
        search.main([str(tmp_path / "empty"), "wing", "--version", "1"])


def test_verbs_are_listed():
    command = [sys.executable, "-m", "jobs"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "search     Searches an index" in done.stdout
    wrong = subprocess.run([*command, "serach"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "'serach' is not a verb" in wrong.stderr
