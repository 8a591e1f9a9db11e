"""The search job: output, options and errors."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import jobs
from jobs import _runs, search
from pipeline.config import SpecError
from pipeline.eval.metrics import read_run
from pipeline.index.writer import IndexWriter
from pipeline.search.fusion import Fusion, FusionWeights
from pipeline.search.searcher import open_index
from tests.conftest import write_index

HALF = Fusion(weights=FusionWeights(bm25=0.5))
ALWAYS_HALF = Fusion(weights=FusionWeights(bm25=0.5), agreement=0)
TEXTS = {"1": "the lift of a wing", "b": "how to bake bread"}


@pytest.fixture
def query_file(tmp_path) -> str:
    lines = [json.dumps({"_id": query_id, "text": text}) for query_id, text in TEXTS.items()]
    (tmp_path / "queries.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "queries.jsonl")


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jobs", "search", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_prints_hits(index_uri):
    result = run_command(index_uri, "slipstream", "--k", "2")
    assert (result.returncode, result.stderr) == (0, "")
    first, snippet, *_ = result.stdout.splitlines()
    rank, score, item_id, *title = first.split()
    expected = open_index(index_uri).search("slipstream", k=2)[0]
    assert (rank, item_id, " ".join(title)) == ("1", expected.item_id, expected.title)
    assert float(score) == pytest.approx(expected.score, abs=1e-4)
    assert "[slipstream]" in snippet.lower()


def test_error_is_one_sentence_with_exit_code_2(index_uri):
    result = run_command(index_uri, "wing", "--representation", "hpool_99")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: representation must be one of full, hpool_4, hpool_2, random_4, got 'hpool_99',"
        " which is not in the index; did you mean 'hpool_4'?\n"
    )


@pytest.mark.parametrize("group_by", [[], ["--group-by", "parent"]])
def test_run_over_a_file(index_uri, query_file, tmp_path, group_by, capsys):
    out = str(tmp_path / "out" / "hybrid.trec")
    arguments = ["--representation", "hpool_4", "--score", "hybrid", "--k", "3", *group_by]
    search.main([index_uri, "--queries", query_file, "--run", out, *arguments])
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
    first, throughput, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("2 queries x 8 items", f"2 queries, 6 hits: {out}")
    assert re.fullmatch(r"[\d,.]+ queries/s", throughput)


def test_run_with_candidates(index_uri, query_file, tmp_path):
    out = str(tmp_path / "run.trec")
    options = ["--candidates", "single", "--num-candidates", "4", "--k", "2"]
    search.main([index_uri, "--queries", query_file, "--run", out, *options])
    keywords = {"candidates": "single", "num_candidates": 4, "k": 2}
    rankings = open_index(index_uri).rank(list(TEXTS.values()), **keywords)
    run = read_run(out)
    assert [list(run[query_id]) for query_id in TEXTS] == [r.item_ids for r in rankings]


def test_hint_for_a_large_index(index_uri, monkeypatch, capsys):
    monkeypatch.setattr("pipeline.search.candidates.EXACT_VECTORS", 0)
    for arguments, has_hint in (([], True), (["--candidates", "exact"], False)):
        search.main([index_uri, "a wing", "-k", "1", *arguments])
        hint = f"`maxray add candidates {index_uri} ivf representation=full`"
        assert (hint in capsys.readouterr().err) is has_hint


def test_fused_search(lexical_uri, query_file, tmp_path, capsys):
    """The settings come from assignments, or from a file and assignments."""
    (tmp_path / "fusion.yaml").write_text("weights: {bm25: 0.5}\n")
    for arguments, fusion in (
        (["--fusion", "weights={}"], Fusion(weights=FusionWeights())),
        (["--fusion", "agreement=3", "weights.bm25=0.5"], HALF),
        (["--fusion", str(tmp_path / "fusion.yaml")], HALF),
        (["--fusion", str(tmp_path / "fusion.yaml"), "agreement=0"], ALWAYS_HALF),
    ):
        out = str(tmp_path / "run.trec")
        options = ["--score", "fused", "--k", "3", "--candidates", "single+bm25", *arguments]
        search.main([lexical_uri, "--queries", query_file, "--run", out, *options])
        keywords = {"score": "fused", "fusion": fusion, "k": 3, "candidates": "single+bm25"}
        rankings = open_index(lexical_uri).rank(list(TEXTS.values()), **keywords)
        run = read_run(out)
        found = [run[query_id] for query_id in TEXTS]
        assert found == [pytest.approx(ranking.scores_by_item()) for ranking in rankings]
    capsys.readouterr()
    search.main(
        [lexical_uri, "a wing", "--score", "fused", "--k", "1", "--fusion", "weights.bm25=0.5"]
    )
    assert re.search(r"BM25 \d\.\d{4}, MaxSim \d\.\d{4} \(mean", capsys.readouterr().out)


def test_actors_equal_one_process(index_uri, query_file, tmp_path, cluster):
    runs = []
    for options in (["--actors", "2"], ["--no-cache"]):
        runs.append(str(tmp_path / f"{len(runs)}.trec"))
        search.main([index_uri, "--queries", query_file, "--run", runs[-1], *options])
    assert read_run(runs[0]) == read_run(runs[1])
    assert len(read_run(runs[0])["1"]) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is available")
def test_rejects_unavailable_device(index_uri):
    with pytest.raises(
        SpecError, match="^device must be one of cpu, got 'cuda', which is not available$"
    ):
        search.main([index_uri, "wing", "--device", "cuda"])


def test_error_lists_available_devices(index_uri, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("nonsense", "cuda:1", "meta"):
        rule = "one of cpu, cuda, cuda:0"
        with pytest.raises(
            SpecError, match=f"^device must be {rule}, got '{device}', which is not available$"
        ):
            open_index(index_uri, device=device)


def test_actor_resources(cluster, monkeypatch):
    from pipeline.search.sharded import actor_resources

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert actor_resources(3, "cpu") == {"num_cpus": 1.0, "num_gpus": 0.0}
    assert actor_resources(12, "cpu") == {"num_cpus": 0.3333, "num_gpus": 0.0}
    with pytest.raises(SpecError, match="^device must be cpu, got 'cuda', which is not available$"):
        actor_resources(1, "cuda")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    assert actor_resources(12, "cuda") == {}


def test_prints_hits_of_query_file(index_uri, query_file, capsys):
    search.main([index_uri, "--queries", query_file, "--k", "1"])
    output = capsys.readouterr().out
    assert "1: the lift of a wing\n  1  " in output
    assert "b: how to bake bread\n  1  " in output


def test_says_that_merged_vectors_do_not_tell_words_apart(index_uri, tmp_path, capsys):
    """Unless the index has the vectors of the words."""
    write_index(str(tmp_path), [{"compressor": {"name": "hpool", "num_vectors": 4}}])
    for uri, expected in ((str(tmp_path), 1), (index_uri, 0)):
        search.main([uri, "the lift of a wing", "--representation", "hpool_4"])
        assert capsys.readouterr().err.count("hpool_4 merges words") == expected


def test_query_vectors(index_uri, tmp_path, capsys):
    texts = list(TEXTS.values())
    encoded = open_index(index_uri).queries(texts)
    np.save(tmp_path / "one.npy", encoded.tokens[0].numpy())
    vectors = [tokens.tolist() for tokens in encoded.tokens]
    pq.write_table(pa.table({"id": list(TEXTS), "vectors": vectors}), tmp_path / "two.parquet")
    search.main([index_uri, texts[0]])
    by_text = capsys.readouterr().out
    search.main([index_uri, "--query-vectors", str(tmp_path / "one.npy")])
    assert capsys.readouterr().out == by_text

    out = str(tmp_path / "two.trec")
    search.main([index_uri, "--query-vectors", str(tmp_path / "two.parquet"), "--run", out])
    hits = dict(zip(TEXTS, open_index(index_uri).search(texts), strict=True))
    assert {query_id: list(scores) for query_id, scores in read_run(out).items()} == {
        query_id: [hit.item_id for hit in query_hits] for query_id, query_hits in hits.items()
    }


def test_filter_and_no_hits(index_uri, capsys):
    search.main([index_uri, "wing", "--filter", "parent_id = 'bread'"])
    heads = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("     ")]
    assert {line.split()[2] for line in heads} == {"bread/1", "bread/2"}
    search.main([index_uri, "wing", "--filter", "parent_id = 'none'"])
    assert capsys.readouterr().out == "no hits\n"


def test_ids_and_parents(index_uri, tmp_path, capsys):
    (tmp_path / "ids").write_text("wing/1\n\nnone\nheat/1 \nwing/1\n")
    (tmp_path / "parents").write_text("heat\nbread\nno\none\n")
    command = [index_uri, "wing", "--ids", str(tmp_path / "ids")]
    search.main([*command, "--json"])
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "ids: 2 of 3 are in the index"
    assert [json.loads(line)["item_id"] for line in out.splitlines()] == ["wing/1", "heat/1"]
    search.main([*command, "--parents", str(tmp_path / "parents")])
    first, second, *hits = capsys.readouterr().out.splitlines()
    assert first == "ids: 2 of 3 are in the index"
    assert second == "parents: 2 of 4 are in the index"
    assert [line.split()[2] for line in hits if line[:5].strip()] == ["heat/1"]

    out = str(tmp_path / "run.trec")
    filter = ["--filter", "item_id <> 'heat/1'"]
    search.main([*command, *filter, "--run", out])
    assert "\n1 queries x 1 items\n" in capsys.readouterr().out
    assert set(read_run(out)["1"]) == {"wing/1"}


def test_hits_as_json(index_uri, query_file, capsys):
    """Each line contains all fields of a hit and the components of its score."""
    options = {"k": 2, "score": "hybrid", "weights": (1, 0.5)}
    command = ["-k", "2", "--score", "hybrid", "--weights", "1", "0.5", "--json"]
    search.main([index_uri, "--queries", query_file, *command])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    hits_of_queries = open_index(index_uri).search(list(TEXTS.values()), **options)
    expected = [
        {"query_id": query_id, **hit.model_dump(mode="json")}
        for query_id, hits in zip(TEXTS, hits_of_queries, strict=True)
        for hit in hits
    ]
    assert rows == json.loads(json.dumps(expected))
    for row in rows:
        parts = row["parts"]
        assert row["score"] == pytest.approx(
            parts["single_vector"] + 0.5 * parts["maxsim_mean"], abs=1e-6
        )
        assert parts["maxsim"] > parts["maxsim_mean"] > 0
        assert sum(m["similarity"] for m in row["matches"]) == pytest.approx(
            parts["maxsim"], abs=1e-4
        )
        assert row["matches"][0]["spans"] and row["passages"][0]["highlights"]


def test_prints_components_of_hybrid_score(index_uri, capsys):
    search.main([index_uri, "slipstream", "--score", "hybrid", "-k", "1"])
    lines = capsys.readouterr().out.splitlines()
    parts = re.fullmatch(r"     single-vector (.{6}), MaxSim (.{6}) \(mean (.{6})\)", lines[1])
    total = float(parts[1]) + float(parts[3])
    assert float(lines[0].split()[1]) == pytest.approx(total, abs=2e-4)
    search.main([index_uri, "slipstream", "-k", "1"])
    assert "single_vector" not in capsys.readouterr().out


def test_queries_are_ranked_in_batches(index_uri, query_file, tmp_path, capsys, monkeypatch):
    whole, parts = str(tmp_path / "whole.trec"), str(tmp_path / "parts.trec")
    search.main([index_uri, "--queries", query_file, "--run", whole])
    capsys.readouterr()
    monkeypatch.setattr(_runs, "QUERY_BATCH", 1)
    monkeypatch.setattr(_runs, "PROGRESS_SECONDS", 0.0)
    search.main([index_uri, "--queries", query_file, "--run", parts])
    assert re.search(r"^\S+ 1 of 2 queries; \S+ queries/s$", capsys.readouterr().out, re.M)
    runs = [read_run(path) for path in (whole, parts)]
    assert {q: pytest.approx(scores, abs=1e-4) for q, scores in runs[0].items()} == runs[1]
    assert {q: list(scores) for q, scores in runs[0].items()} == {
        q: list(scores) for q, scores in runs[1].items()
    }


def test_run_tag_contains_weights(index_uri, tmp_path):
    out = tmp_path / "run.trec"
    search.main(
        [index_uri, "wing", "--score", "hybrid", "--weights", "1", ".25", "--run", str(out)]
    )
    assert out.read_text().splitlines()[0].endswith(" full.hybrid-1-0.25")
    search.main([index_uri, "wing", "--score", "hybrid", "--run", str(out)])
    assert out.read_text().splitlines()[0].endswith(" full.hybrid")


BAD = {
    "empty.jsonl": "\n",
    "twice.tsv": "1\twing\n\n1\tbread\n",
    "no_text.jsonl": '{"_id": "1", "text": "a wing"}\n{"_id": "2"}\n',
    "no_id.jsonl": '{"_id": null, "text": "a wing"}\n',
    "half.jsonl": '{"_id": "1", "text": "\\ud800"}\n',
    "broken.jsonl": '{"_id": "1", "text": "a wing"}\n{"_id": "2", "te\n',
}
LINE = 'queries must be a line {"_id": "1", "text": "..."} or id<TAB>text, neither empty, got '
MESSAGES = {
    "gone.jsonl": "queries must be the path of an existing file, got 'gone.jsonl', which does"
    " not exist",
    "empty.jsonl": "queries must be a file with at least one query, got 'empty.jsonl', which"
    " is empty",
    "twice.tsv": "queries must be a unique id, got '1', which occurs twice (line 3)",
    "no_text.jsonl": LINE + """'{"_id": "2"}' (line 2 of no_text.jsonl)""",
    "no_id.jsonl": LINE + f"'{BAD['no_id.jsonl'][:-1]}' (line 1 of no_id.jsonl)",
    "half.jsonl": LINE + f"{BAD['half.jsonl'][:-1]!r}, which cannot be parsed ('utf-8' codec can't"
    " encode character '\\ud800' in position 22: surrogates not allowed) (line 1 of half.jsonl)",
    "broken.jsonl": LINE + """'{"_id": "2", "te', which cannot be parsed (Unterminated string"""
    " starting at, column 14) (line 2 of broken.jsonl)",
}


def error_message(arguments, capsys) -> str:
    """Returns the error message of a search with invalid input, which exits with code 2."""
    with pytest.raises(SystemExit) as exit:
        jobs.run(search.main, arguments)
    out, err = capsys.readouterr()
    assert (exit.value.code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    return err[len("error: ") : -1]


@pytest.mark.parametrize("file", MESSAGES)
def test_rejects_invalid_query_files(index_uri, tmp_path, file, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if file in BAD:
        (tmp_path / file).write_text(BAD[file])
    arguments = [index_uri, "--queries", file, "--run", "out.trec"]
    assert error_message(arguments, capsys) == MESSAGES[file]
    assert not (tmp_path / "out.trec").exists()


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.full((2, 384), np.nan), "finite in float32, got 'b', which has NaN or infinity"),
        (
            np.zeros((2, 384)),
            "an array with at least one non-zero vector, got 'b', which has only zeros",
        ),
        (
            np.ones((2, 5)),
            "vectors of dimension 384, got 'b', which has vectors of dimension 5",
        ),
        (
            np.ones((0, 384)),
            "a numeric array of shape (query tokens, dim), got 'b', which has an array of shape"
            " (0,)",
        ),
        (
            None,
            "a file of at least one query, each with a unique id, got '{}', which has the same id"
            " twice",
        ),
    ],
)
def test_rejects_invalid_query_vectors(index_uri, tmp_path, vectors, message, capsys):
    ids = ["a", "a"] if vectors is None else ["a", "b"]
    vectors = np.ones((1, 384)) if vectors is None else vectors
    table = pa.table({"id": ids, "vectors": [np.ones((1, 384)).tolist(), vectors.tolist()]})
    pq.write_table(table, tmp_path / "queries.parquet")
    file, out = str(tmp_path / "queries.parquet"), str(tmp_path / "out")
    error = error_message([index_uri, "--query-vectors", file, "--run", out], capsys)
    assert re.fullmatch(f"query.vectors must be {re.escape(message.replace('{}', file))}", error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--filter", "parent_id = 'heat' OR"], "filter must be an SQL condition over the "
         "columns of the items, such as modality = 'text', got \"parent_id = 'heat' OR\", which "
         "does not parse at its end (expected an expression)"),
        (["--filter", "heat"], "filter must be a condition on item_id, parent_id, source, "
         "modality, span.unit, span.start, span.end, title, text, caption, revision, metadata, "
         "got 'heat', which names the unknown column 'heat' at character 1"),
        (["--score", "hybrid", "--weights", "0", "0"], "weights must be two numbers "
         "(single_vector, maxsim), each 0 or from 1e-6 to 1e6, and not both 0, got [0, 0]"),
        (["--score", "hybrid", "--weights", "nan", "1"], "weights must be two numbers "
         "(single_vector, maxsim), each 0 or from 1e-6 to 1e6, and not both 0, got ['nan', 1]"),
        (["--weights", "1", "2"], "weights must be [1.0, 1.0] for the score maxsim, "
         "got [1.0, 2.0]"),
        (["--weights", "1", "x"], "weights must be two numbers "
         "(single_vector, maxsim), each 0 or from 1e-6 to 1e6, and not both 0, got [1, 'x']"),
        (["--candidates", "ivf"], "candidates must be one of exact, single, got 'ivf', which "
         "was not built for full; build it with `maxray add candidates INDEX GENERATOR` for "
         "full"),
        (["--candidates", "single+ivf"], "candidates must be generators of single, joined by +, "
         "got 'single+ivf', which contains 'ivf', which was not built for full; build it "
         "with `maxray add candidates INDEX GENERATOR` for full"),
        (["--score", "fused"], "fusion.weights must be set for the score fused, got None; fit them "
         "with `maxray evaluate SPEC --fit-fusion fusion.yaml`"),
        (["--score", "fused", "--fusion", "weights={}"],
         "score must be maxsim, got 'fused', which needs bm25, which was not "
         "built for the texts of full; build it with `maxray add candidates INDEX bm25`"),
        (["--fusion", "agreement=0"], "score must be fused if fusion is set, got 'maxsim'"),
        (["--score", "fused", "--fusion", "weights.bm=1"], "unknown field 'bm' in fusion.weights; "
         "did you mean 'bm25'? valid fields: maxsim, bm25, single_vector"),
        (["--score", "fused", "--fusion", "gone.yaml"], "fusion must be a YAML file with a mapping "
         "of fields to values, got 'gone.yaml', which does not exist"),
        (["--num-candidates", "9"], "num_candidates must be at least k = 10, got 9"),
        (["-k", "0"], "k must be greater than or equal to 1, got 0"),
        (["-k", "true"], "k must be a number, got True"),
        (["--score", "best"], "argument --score: invalid choice: 'best' (choose from 'maxsim', "
         "'single_vector', 'hybrid', 'fused'); see --help"),
        (["--ids", "gone"], "ids must be the path of an existing file, got 'gone', which does"
                            " not exist"),
        (["--ids", "none"], "ids must be a file with at least one id, got 'none', which is empty"),
        (["--run", "none/run.trec"], "run must be the path of a file that can be written, got"
        " 'none/run.trec', "
         "which is below the file none"),
        (["--run", "pipe"], "run must be the path of a file that can be written, got"
        " 'pipe', which is a device or"
                            " a pipe"),
        (["--run", "stream"], "run must be the path of a file that can be written, got"
        " 'stream', which is a"
                              " device or a pipe"),
        (["--run", "x", "--json"], "--json cannot be combined with --run; see --help"),
    ],
)  # fmt: skip
def test_rejects_invalid_options(index_uri, tmp_path, options, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").write_text("\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "stream").symlink_to("/proc/self/fd/1")  # like /dev/stdout
    error = error_message([index_uri, "wing", *options], capsys)
    assert error.replace(f"{tmp_path}/", "") == message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none", "pipe", "stream"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "stream").is_symlink()


def test_failed_run_writes_no_file(index_uri, tmp_path):
    (tmp_path / "queries.tsv").write_text("1\twing\n2\t \n")
    with pytest.raises(SpecError, match=r"\(line 2 of "):
        search.main([index_uri, "--queries", str(tmp_path / "queries.tsv"), "--run", str(tmp_path)])
    with pytest.raises(
        SpecError,
        match="run must be the path of a file that can be written, got .* which is a folder",
    ):
        search.main([index_uri, "wing", "--run", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["queries.tsv"]


def test_order_of_options_and_unquoted_words(index_uri, capsys):
    search.main([index_uri, "the lift of a wing", "--k", "2"])
    expected = capsys.readouterr().out
    search.main(["--k", "2", index_uri, "the", "lift", "--score", "maxsim", "of", "a", "wing"])
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("arguments", [[], ["wing", "--queries", "queries.tsv"]])
def test_requires_exactly_one_kind_of_query(index_uri, arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        search.main([index_uri, *arguments])
    assert exit.value.code == 2
    assert capsys.readouterr().err == (
        "error: exactly one of these is required: QUERY, --image, --audio or --video, or a "
        "combination of these; --queries; or --query-vectors; see --help\n"
    )


def test_rejects_unknown_home(capsys):
    message = (
        "index must be a path whose ~ can be expanded, got '~nobody-of-this-name/x', which names"
        " an unknown user"
    )
    assert error_message(["~nobody-of-this-name/x", "wing"], capsys) == message


def test_save_maps_requires_one_query(index_uri, tmp_path, capsys):
    vectors = np.ones((2, 3, 384), np.float32).tolist()
    file, maps = tmp_path / "queries.parquet", str(tmp_path / "maps")
    pq.write_table(pa.table({"id": ["a", "b"], "vectors": vectors}), file)
    arguments = [index_uri, "--query-vectors", str(file), "--save-maps", maps]
    rule = "a file with a single query if --save-maps is used"
    problem = "contains 2 queries"
    assert error_message(arguments, capsys) == (
        f"query-vectors must be {rule}, got '{file}', which {problem}"
    )


def test_rejects_versions_that_cannot_be_searched(index_uri, tmp_path):
    message = r"^version must be a stored version from 1 to \d+, got 999, which does not exist"
    with pytest.raises(SpecError, match=message):
        search.main([index_uri, "wing", "--version", "999"])
    IndexWriter(str(tmp_path / "empty"), "a-job").release()
    message = (
        "^index must be an index with at least one representation, got '.*empty', which"
        " has no representations"
        " in version 1$"
    )
    with pytest.raises(SpecError, match=message):
        search.main([str(tmp_path / "empty"), "wing", "--version", "1"])


def test_lists_commands():
    command = [sys.executable, "-m", "jobs"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "search     Searches an index" in result.stdout
    for name, meant in (("serach", "search"), ("compare", "evaluate compare")):
        unknown = subprocess.run([*command, name], capture_output=True, text=True, check=False)
        assert unknown.returncode == 2
        assert f"unknown command '{name}'; did you mean '{meant}'?" in unknown.stderr
