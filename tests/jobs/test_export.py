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
from pipeline.index import export as exporting
from pipeline.index.reader import Index
from pipeline.schema import METADATA_KEY
from pipeline.sources.vectors import Vectors


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
    for rows, flat, lengths in Index(uri).tokens(name, filter=filter):
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
    assert metadata.items() >= Index(index_uri).representation("hpool_4").to_metadata().items()
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
    assert (metadata["version"], metadata["representation"]) == (Index(index_uri).version, "full")
    assert len(list((tmp_path / "a").iterdir())) == 5
    assert metadata["fingerprint"] == Index(index_uri).representation("full").encoder.fingerprint


def test_single_vectors(index_uri, output, form):
    export.main([index_uri, str(output), "--representation", "minilm_pooled", "--format", form])
    table = Index(index_uri).dataset.to_table(columns=["item_id", "minilm_pooled"])
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
        SpecError, match="^output must be the path of a file, got .*, which is a folder"
    ):
        export.main([index_uri, str(tmp_path / "a.parquet"), *options])
    with pytest.raises(
        SpecError, match="^output must be the path of a folder, got .*, which is a file"
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
            'filter must be a condition that matches items with vectors, got "parent_id ='
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
