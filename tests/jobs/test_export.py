"""Tests of the export job: round trips through both formats, and atomic output."""

import json
import subprocess
import sys
import tracemalloc

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import export
from pipeline.config import SpecError, parse
from pipeline.data.vectors import Vectors
from pipeline.eval.evaluation import run as run_evaluation
from pipeline.eval.metrics import read_run
from pipeline.eval.spec import EvaluateSpec
from pipeline.eval.topics import read_qrels
from pipeline.index import export as exporting
from pipeline.index import job
from pipeline.index.reader import IndexReader
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.schema import METADATA_KEY
from pipeline.search.searcher import open_index


def read_back(path, dim=384):
    """Reads an export with the `vectors` source and returns its items by id."""
    source = Vectors(parse(Vectors.Spec, {"path": str(path), "dim": dim}))
    source.check()
    return {
        item.item_id: item
        for shard in source.shards()
        for item in source.decode(shard, list(enumerate(source.scan(shard))))
    }


def stored_vectors(uri, name, filter=None):
    """Returns the vectors of a representation of an index by id."""
    vectors = {}
    for rows, flat, lengths in IndexReader(uri).tokens(name, filter=filter):
        parts = np.split(flat.astype(np.float32), np.cumsum(lengths)[:-1])
        vectors |= dict(zip(rows["item_id"].to_pylist(), parts, strict=True))
    return vectors


def assert_equal(actual, expected):
    assert list(actual) == list(expected)
    for item_id, vectors in expected.items():
        np.testing.assert_array_equal(actual[item_id].payload["vectors"], vectors)


@pytest.fixture(params=["parquet", "npy"])
def form(request):
    return request.param


@pytest.fixture
def output(tmp_path, form):
    return tmp_path / "out" / {"parquet": "vectors.parquet", "npy": "vectors"}[form]


@pytest.mark.parametrize("name", ["full", "hpool_4", "hpool_2"])  # hpool_2 lacks an item
def test_round_trip_through_the_vectors_source(index_uri, output, form, name, texts, monkeypatch):
    monkeypatch.setattr(exporting, "BATCH_ROWS", 3)
    export.main([index_uri, str(output), "--representation", name, "--format", form])
    found = read_back(output)
    assert_equal(found, stored_vectors(index_uri, name))
    assert len(found) == len(texts) - (name == "hpool_2")
    if form == "parquet":
        assert found["wing/1"].text == texts["wing/1"]
        assert found["wing/1"].title == "On wing/1"
        assert found["wing/1"].parent_id == "wing"
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_parquet_columns_and_metadata(index_uri, tmp_path):
    path = tmp_path / "a.parquet"
    export.main([index_uri, str(path), "--representation", "hpool_4"])
    table = pq.read_table(path)
    assert table.schema.names[:4] == ["id", "vectors", "parent_id", "source"]
    assert str(table.schema.field("vectors").type.value_type.value_type) == "halffloat"
    metadata = json.loads(table.schema.metadata[METADATA_KEY])
    assert (
        metadata.items() >= IndexReader(index_uri).representation("hpool_4").to_metadata().items()
    )
    assert (metadata["representation"], metadata["items"], metadata["filter"]) == (
        "hpool_4",
        8,
        None,
    )
    assert {"span", "metadata", "text", "title", "revision"} <= set(table.schema.names)


def test_npy_files_and_metadata(index_uri, tmp_path, texts):
    export.main([index_uri, str(tmp_path / "a"), "--representation", "full", "--format", "npy"])
    names = ("documents", "doclens", "doc_ids")
    vectors, lengths, ids = (np.load(tmp_path / "a" / f"{name}.npy") for name in names)
    assert vectors.dtype == np.float16 and vectors.shape == (lengths.sum(), 384)
    assert lengths.dtype == np.int32
    items = [json.loads(line) for line in (tmp_path / "a/items.jsonl").read_text().splitlines()]
    assert [item["id"] for item in items] == ids.tolist() == list(texts)
    assert [item["text"] for item in items] == list(texts.values())
    assert {"parent_id", "title", "span", "metadata"} <= set(items[0])
    metadata = json.loads((tmp_path / "a/metadata.json").read_text())
    assert (metadata["version"], metadata["representation"]) == (
        IndexReader(index_uri).version,
        "full",
    )
    assert len(list((tmp_path / "a").iterdir())) == 5
    assert (
        metadata["fingerprint"] == IndexReader(index_uri).representation("full").encoder.fingerprint
    )


def test_single_vectors(index_uri, output, form):
    export.main([index_uri, str(output), "--representation", "minilm_pooled", "--format", form])
    table = IndexReader(index_uri).dataset.to_table(columns=["item_id", "minilm_pooled"])
    expected = {
        row["item_id"]: np.array([row["minilm_pooled"]], np.float32) for row in table.to_pylist()
    }
    assert_equal(read_back(output), expected)


def test_filter(index_uri, output, form, capsys):
    filter = "parent_id = 'bread' OR parent_id = 'flow'"
    options = ["--representation", "hpool_2", "--format", form, "--filter", filter]
    export.main([index_uri, str(output), *options])
    assert list(read_back(output)) == ["flow", "bread/1"]  # bread/2 has no vectors
    assert f" 2 items, 4 vectors of hpool_2: {output}\n" in capsys.readouterr().out


def test_fsspec_uri(index_uri, form):
    uri = "memory://exports/" + {"parquet": "a.parquet", "npy": "a"}[form]
    for overwrite in ([], ["--overwrite"]):
        options = ["--representation", "hpool_4", "--format", form]
        export.main([index_uri, uri, *options, *overwrite])
        assert_equal(read_back(uri), stored_vectors(index_uri, "hpool_4"))
    with pytest.raises(
        SpecError,
        match="^output must be a new path unless --overwrite is given, got .*, which exists",
    ):
        export.main([index_uri, uri, *options])
    fsspec.filesystem("memory").rm("/exports", recursive=True)
    with pytest.raises(
        SpecError,
        match="^output must be a reachable URI, got 'nowhere://a.parquet', which cannot be",
    ):
        export.main([index_uri, "nowhere://a.parquet", "--representation", "full"])


def test_existing_output(index_uri, output, form):
    options = [index_uri, str(output), "--format", form, "--representation"]
    export.main([*options, "full"])
    with pytest.raises(
        SpecError,
        match="^output must be a new path unless --overwrite is given, got .*, which exists",
    ):
        export.main([*options, "hpool_4"])
    assert_equal(read_back(output), stored_vectors(index_uri, "full"))
    export.main([*options, "hpool_4", "--overwrite"])
    assert_equal(read_back(output), stored_vectors(index_uri, "hpool_4"))
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_empty_output_folder(index_uri, tmp_path):
    (tmp_path / "a").mkdir()
    export.main([index_uri, str(tmp_path / "a"), "--representation", "full", "--format", "npy"])
    assert_equal(read_back(tmp_path / "a"), stored_vectors(index_uri, "full"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_other_files_are_never_overwritten(index_uri, tmp_path):
    (tmp_path / "thesis.txt").write_text("chapter one")
    options = ["--representation", "full", "--overwrite"]
    with pytest.raises(
        SpecError, match="^output must be a new path or .*, got .*, which is a folder with other f"
    ):
        export.main([index_uri, str(tmp_path), *options, "--format", "npy"])
    (tmp_path / "a.parquet").mkdir()
    with pytest.raises(
        SpecError,
        match="^output must be the path of a file that can be written, got .*, which is a folder",
    ):
        export.main([index_uri, str(tmp_path / "a.parquet"), *options])
    with pytest.raises(
        SpecError,
        match="^output must be the path of a folder that can be written, got .*, which is a file",
    ):
        export.main([index_uri, str(tmp_path / "thesis.txt"), *options, "--format", "npy"])
    with pytest.raises(
        SpecError, match="^output must be a path that ends in .parquet, unless .*, got "
    ):
        export.main([index_uri, str(tmp_path / "thesis.txt"), *options])
    assert (tmp_path / "thesis.txt").read_text() == "chapter one"


def test_failed_export_leaves_no_files(index_uri, output, form, monkeypatch):
    """An existing export remains."""
    options = [index_uri, str(output), "--representation", "full", "--format", form, "--overwrite"]
    monkeypatch.setattr(exporting, "BATCH_ROWS", 3)

    def fail(*args):
        assert len(list(output.parent.iterdir())) > before  # it is being written
        raise OSError("no space left")

    for before in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(exporting, "_move", fail)
            with pytest.raises(OSError, match="no space left"):
                export.main(options)
        assert len(list(output.parent.iterdir())) == before
        export.main(options)
    assert_equal(read_back(output), stored_vectors(index_uri, "full"))


def run_as_user(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jobs", "export", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--representation", "hpool_99"],
            "representation must be one of minilm_pooled, full, hpool_4, hpool_2, random_4, got"
            " 'hpool_99', which is not in the index",
        ),
        (
            ["--representation", "full", "--filter", "parent_id ="],
            "filter must be an SQL condition over the columns of the items, ",
        ),
        (
            ["--representation", "full", "--filter", "colour = 1"],
            "filter must be a condition on item_id, ",
        ),
        (
            ["--representation", "full", "--filter", "parent_id = 'none'"],
            'filter must be a condition that matches items, got "parent_id ='
            " 'none'\", which matches no items",
        ),
        ([], "the following arguments are required: --representation; see --help"),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(index_uri, tmp_path, arguments, message):
    done = run_as_user(index_uri, str(tmp_path / "a.parquet"), *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unwritable_output(index_uri, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_as_user(index_uri, str(tmp_path / "file/a.parquet"), "--representation", "full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: output must be ") and "is below the file" in done.stderr


def test_memory_does_not_grow_with_the_index(index_uri, output, form, monkeypatch):
    """Exports the rows a hundred times over."""
    monkeypatch.setattr(exporting, "REPORT_SECONDS", 0.0)
    rows = exporting._rows
    allocated = []

    def many(*args):
        for _ in range(100):
            for batch in rows(*args):
                yield batch
                allocated.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes())

    monkeypatch.setattr(exporting, "_rows", many)
    lines = []
    tracemalloc.start()
    try:
        exporting.export(index_uri, str(output), "full", form=form, report=lines.append)
    finally:
        tracemalloc.stop()
    assert len(allocated) == 100 and max(allocated[20:]) < allocated[19] + (1 << 20)
    assert len(lines) == 101 and lines[0] == "8 of 8 items"


QUERIES = {"1": "the lift of a wing", "b": "how to bake bread", "c": "never judged"}
QRELS = {"1": {"wing/1": 1, "flow": 0}, "b": {"bread/1": 2, "bread/2": 1}}


@pytest.fixture
def benchmark(tmp_path):
    """A BEIR folder that judges items."""
    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    lines = [{"_id": query_id, "text": text} for query_id, text in QUERIES.items()]
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [f"{q}\t{d}\t{grade}\n" for q, grades in QRELS.items() for d, grade in grades.items()]
    (folder / "qrels" / "test.tsv").write_text("".join(lines))
    return folder


def with_queries(benchmark):
    queries, qrels = benchmark / "queries.jsonl", benchmark / "qrels/test.tsv"
    return ["--format", "npy", "--queries", str(queries), "--qrels", str(qrels)]


def maxsim(folder, query_id):
    """Returns the scores of all items for a query, computed from the arrays of an export."""
    names = ("documents", "doclens", "doc_ids", "queries", "query_ids")
    vectors, lengths, ids, queries, query_ids = (np.load(folder / f"{n}.npy") for n in names)
    (query,) = queries[query_ids == query_id]
    items = np.split(vectors.astype(np.float32), np.cumsum(lengths)[:-1])
    scores = [float((query @ item.T).max(axis=1).sum()) for item in items]
    return dict(zip(ids.tolist(), scores, strict=True))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("name", "tolerance"), [("full", 1e-4), ("hpool_4", 1e-4), ("nested_8_int8@3", 1e-3)]
)
def test_indexed_export_has_equal_results(
    index_uri, nested_uri, tmp_path, benchmark, name, tolerance
):
    """The index of an export finds the same items with the same scores and metrics.

    The compressor `none` normalises the vectors, whose length is not exactly 1 after quantisation,
    so these scores have a tolerance. Those of the exported arrays equal the scores of the index.
    """
    uri = nested_uri if "@" in name else index_uri
    folder = tmp_path / "data"
    export.main([uri, str(folder), "--representation", name, *with_queries(benchmark)])

    spec = {
        "index": str(tmp_path / "index"),
        "source": {"name": "vectors", "path": str(folder)},
        "encoder": {"name": "precomputed", "dim": 384, "label": "export", "normalise": False},
        "representations": [{"compressor": "none", "codec": "float32"}],
    }
    job.run(parse(IndexSpec, spec), IndexResources(), job="test", report=lambda line: None)

    evaluations = []
    for index, representation, fields in (
        (uri, name, {"name": "beir", "path": str(benchmark)}),
        (spec["index"], "full_float32", {"name": "npy", "path": str(folder)}),
    ):
        evaluation = {
            "index": index,
            "benchmark": fields,
            "output": str(tmp_path / f"evaluation{len(evaluations)}"),
            "representations": [representation],
            "scores": ["maxsim"],
            "judged": "item",
        }
        lines = []
        result = run_evaluation(parse(EvaluateSpec, evaluation), lines.append)
        run_file = f"{evaluation['output']}/runs/{representation}.maxsim.trec"
        means = next(r.means for r in result.results if r.representation == representation)
        evaluations.append((read_run(run_file), means, lines))
    (expected_run, expected_means, _), (actual_run, actual_means, lines) = evaluations
    assert list(actual_run) == ["1", "b"]
    for query_id, scores in expected_run.items():
        assert list(actual_run[query_id]) == list(scores)
        assert actual_run[query_id] == pytest.approx(scores, rel=tolerance)
        assert maxsim(folder, query_id) == pytest.approx(scores, rel=1e-5)
    assert actual_means == expected_means
    assert "no BM25 row: the queries have no texts" in lines


def test_queries_and_judgments(index_uri, tmp_path, benchmark):
    folder = tmp_path / "a"
    options = ["--representation", "full", *with_queries(benchmark)]
    export.main([index_uri, str(folder), *options])
    vectors, ids = np.load(folder / "queries.npy"), np.load(folder / "query_ids.npy")
    assert vectors.dtype == np.float32 and ids.tolist() == list(QUERIES)
    encoded = open_index(index_uri).queries(list(QUERIES.values()), "full").tokens
    assert vectors.shape == (3, max(map(len, encoded)), 384)
    for row, tokens in zip(vectors, encoded, strict=True):
        np.testing.assert_allclose(row[: len(tokens)], tokens.numpy(), atol=1e-6)
        assert not row[len(tokens) :].any()
    assert read_qrels(str(folder / "qrels.tsv")) == QRELS
    export.main([index_uri, "memory://queries", *options])
    assert fsspec.filesystem("memory").cat("/queries/query_ids.npy")
    fsspec.filesystem("memory").rm("/queries", recursive=True)


@pytest.mark.parametrize("name", ["nested_8@3", "nested_half@2", "nested_8_int8@5"])
def test_prefixes(nested_uri, output, form, name):
    export.main([nested_uri, str(output), "--representation", name, "--format", form])
    assert_equal(read_back(output), stored_vectors(nested_uri, name))


@pytest.mark.parametrize("name", ["full", "random_4"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype(index_uri, tmp_path, name, dtype):
    options = ["--representation", name, "--format", "npy", "--dtype", dtype]
    export.main([index_uri, str(tmp_path / "a"), *options])
    vectors = np.load(tmp_path / "a/documents.npy", mmap_mode="r")
    expected = np.concatenate(list(stored_vectors(index_uri, name).values()))
    assert vectors.dtype == dtype
    np.testing.assert_array_equal(vectors, expected.astype(dtype))


def test_dtype_with_a_smaller_range(index_uri, output, form, monkeypatch):
    rows = exporting._rows

    def large_rows(*args):
        for items, vectors, lengths in rows(*args):
            yield items, vectors.astype(np.float32) * 1e7, lengths

    monkeypatch.setattr(exporting, "_rows", large_rows)
    options = ["--representation", "full", "--format", form, "--dtype", "float16"]
    with pytest.raises(SpecError, match=r"^dtype must be float32 for .*, got 'float16', which"):
        export.main([index_uri, str(output), *options])
    assert list(output.parent.iterdir()) == []


def test_invalid_options(index_uri, nested_uri, tmp_path, benchmark):
    def expect_error(match, *options, uri=index_uri):
        with pytest.raises(SpecError, match=match):
            export.main([uri, str(tmp_path / "a.parquet"), *options])
        assert not (tmp_path / "a.parquet").exists()

    full, npy = ["--representation", "full"], ["--format", "npy"]
    missing = str(tmp_path / "missing")
    expect_error("^format must be npy if --queries is given", *full, "--queries", missing)
    expect_error("^format must be npy if --qrels is given", *full, "--qrels", missing)
    expect_error("^queries must be .* does not exist", *full, *npy, "--queries", missing)
    expect_error("^qrels must be .* does not exist", *full, *npy, "--qrels", missing)
    expect_error(
        "^representation must be a representation of token vectors .* stores single vectors",
        *("--representation", "minilm_pooled", *with_queries(benchmark)),
    )
    qrels = benchmark / "qrels/test.tsv"
    qrels.write_text("1 0 wing 1\n")
    expect_error(
        "^qrels must be judgments of item ids, got 'wing', which has none of the exported items",
        *(*full, *npy, "--qrels", str(qrels)),
    )
    expect_error("^representation must be .* stores no nested", "--representation", "full@2")
    expect_error("^representation must be one of ", "--representation", "minilm_pooled@2")
    prefix = ("--representation", "nested_8@9")
    expect_error("^representation must be nested_8@K with an integer K", *prefix, uri=nested_uri)
