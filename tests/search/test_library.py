"""`pipeline.Index`: the calls of a Python program, and what it does with wrong input."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Index
from pipeline.config import Spec, SpecError, parse
from pipeline.index import job
from pipeline.index.folder import folder_spec
from pipeline.index.reader import IndexReader
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.writer import LeaseHeld
from pipeline.search.candidates import VECTORS_PER_ITEM, slow_search_hint
from pipeline.search.options import SearchOptions

DIM = 16


def items(number: int, seed: int = 0, unit: bool = False) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    arrays = [random.standard_normal((3 + i % 5, DIM)).astype(np.float32) for i in range(number)]
    return [a / np.linalg.norm(a, axis=1, keepdims=True) for a in arrays] if unit else arrays


def ids(number: int) -> list[str]:
    return [f"item-{i}" for i in range(number)]


def stored(uri: Path | str) -> dict[str, np.ndarray]:
    """Returns the decoded vectors of all items."""
    found = {}
    for rows, vectors, lengths in IndexReader(str(uri)).tokens("full"):
        parts = np.split(vectors, np.cumsum(lengths)[:-1])
        found |= dict(zip(rows["item_id"].to_pylist(), parts, strict=True))
    return found


@pytest.fixture
def index(tmp_path: Path) -> Index:
    index = Index(tmp_path / "library")
    index.add(ids(12), items(12), texts=[f"text {i}" for i in range(12)])
    return index


def test_three_calls(tmp_path):
    index = Index(tmp_path / "library")
    assert len(index) == 0 and index.representations == {}
    vectors = items(12, unit=True)
    version = index.add(ids(12), vectors, metadata=[{"year": 2000 + i} for i in range(12)])
    assert version == index.reader.version and len(index) == 12
    for number in (0, 7, 11):
        hits = index.search(vectors[number], k=2)
        assert hits[0].item_id == f"item-{number}"
        assert hits[0].score == pytest.approx(len(vectors[number]), abs=0.05)
    hits = index.search(vectors[0], filter="metadata LIKE '%2003%'")
    assert [hit.item_id for hit in hits] == ["item-3"]


def test_directions_of_vectors_are_stored(tmp_path):
    for name, unit in (("unit", True), ("other", False)):
        Index(tmp_path / name).add(ids(6), items(6, unit=unit))
        for item_id, expected in zip(ids(6), items(6, unit=True), strict=True):
            assert stored(tmp_path / name)[item_id] == pytest.approx(expected, abs=0.01)


def test_tensors_padded_arrays_and_single_vectors(tmp_path):
    vectors = items(3, unit=True)
    padded = torch.zeros(3, 9, DIM, dtype=torch.bfloat16)
    for row, item in enumerate(vectors):
        padded[row, 9 - len(item) :] = torch.from_numpy(item)  # on the left, as engines pad
    Index(tmp_path / "padded").add(ids(3), padded)
    Index(tmp_path / "tensors").add(ids(3), [torch.from_numpy(item) for item in vectors])
    Index(tmp_path / "single").add(ids(3), np.stack([item[0] for item in vectors]))
    for name in ("padded", "tensors"):
        found = stored(tmp_path / name)
        for item_id, expected in zip(ids(3), vectors, strict=True):
            assert found[item_id] == pytest.approx(expected, abs=0.02)
    assert {len(item) for item in stored(tmp_path / "single").values()} == {1}
    hits = Index(tmp_path / "tensors").search(torch.from_numpy(vectors[1]))
    assert hits[0].item_id == "item-1"


def test_add_replaces_and_fills_all_representations(index):
    name = index.compress("kcenter", 2)
    before = index.reader.version
    new = items(2, seed=1)
    version = index.add(["item-3", "new"], new, texts=["other", None])
    assert len(index) == 13
    assert index.search(new[0])[0].item_id == "item-3"
    assert index.search(new[0])[0].text == "other"
    assert index.search(new[1], name)[0].item_id == "new"
    columns = IndexReader(index.uri).dataset.to_table(["item_id", "full", name])
    assert columns["full"].null_count == columns[name].null_count == 0
    assert version > before
    assert Index(index.uri, version=before).search(new[0], k=1)[0].item_id != "new"


def test_a_call_makes_one_commit_of_rows(index):
    dataset = IndexReader(index.uri).dataset
    before = dataset.version
    index.add(["item-3", "new"], items(2, seed=1))
    rows = [len(IndexReader(index.uri, v)) for v in range(before, index.reader.version + 1)]
    assert [b - a for a, b in itertools.pairwise(rows) if b != a] == [1]


def test_columns_equal_those_of_a_job(tmp_path):
    vectors = items(10, unit=True)
    columns = [
        {"id": "full", "compressor": "none", "codec": "int8"},
        {"compressor": {"name": "hpool", "num_vectors": 2}, "codec": "float16"},
        {"compressor": "none", "codec": {"name": "residual", "num_centroids": 4}},
    ]
    index = Index(tmp_path / "library")
    index.add(ids(10), vectors, representations=columns, label="model")
    folder = tmp_path / "vectors"
    folder.mkdir()
    np.save(folder / "vectors.npy", np.concatenate(vectors))
    np.save(folder / "lengths.npy", np.array([len(item) for item in vectors]))
    (folder / "ids.txt").write_text("".join(f"{name}\n" for name in ids(10)))
    spec = {
        "index": str(tmp_path / "job"),
        "source": {"name": "vectors", "path": str(folder)},
        "encoder": {"name": "precomputed", "label": "model"},  # the width is that of the file
        "representations": columns,
    }
    job.run(parse(IndexSpec, spec), IndexResources(), job="job")
    tables = [
        IndexReader(str(tmp_path / name)).dataset.to_table().sort_by("item_id")
        for name in ("library", "job")
    ]
    assert tables[0].column_names == tables[1].column_names
    for name in tables[0].column_names:
        if name not in ("source", "revision"):
            assert tables[0][name].combine_chunks().equals(tables[1][name].combine_chunks()), name


def test_delete_compress_and_candidates(index):
    assert index.delete(["item-0", "unknown"]) == 1
    assert index.delete(filter="text = 'text 1'") == 1
    assert len(index) == 10
    index.add_candidates({"name": "ivf", "num_centroids": 16})
    query = items(12)[5]
    assert index.search(query, candidates="ivf", num_candidates=10)[0].item_id == "item-5"
    index.add(["new"], [query * 2])  # has no code yet, and is scored nevertheless
    hits = index.search(query, candidates="ivf", num_candidates=11)
    assert {hit.item_id for hit in hits[:2]} == {"item-5", "new"}


def test_large_indexes_are_searched_with_candidates(index, monkeypatch):
    def chosen(device: str = "cpu", **options: Any) -> str:
        return parse(SearchOptions, options).resolve(index.reader, device).candidates

    def hint() -> str | None:
        return slow_search_hint(index.reader, index.representations["full"])

    assert hint() is None
    monkeypatch.setattr("pipeline.search.candidates.EXACT_VECTORS", 12 * VECTORS_PER_ITEM - 1)
    assert f"`maxray add candidates {index.uri} ivf representation=full`" in str(hint())
    assert chosen() == "exact"
    index.add_candidates({"name": "ivf", "num_centroids": 16})
    assert (hint(), chosen(), chosen(candidates="auto")) == (None, "ivf", "ivf")
    assert {chosen("cuda"), chosen(candidates="exact"), chosen(score="single_vector")} == {"exact"}
    query = items(12)[5]
    assert index.search(query, num_candidates=10)[0].item_id == "item-5"
    monkeypatch.undo()
    assert chosen() == "exact"


def test_text_queries_of_another_library(index):
    vectors = items(12)
    with pytest.raises(SpecError, match="query must be query vectors"):
        index.search("text 4")

    def encode(texts: list[str]) -> list[torch.Tensor]:
        return [torch.from_numpy(vectors[int(text.split()[1])]) for text in texts]

    index = Index(index.uri, encode_queries=encode)
    assert index.search("text 4", k=1)[0].item_id == "item-4"
    found = index.search(["text 4", "text 9"], k=1)
    assert [hits[0].item_id for hits in found] == ["item-4", "item-9"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": []}, "vectors must be a list of 0 values, one per id, got 'a list of 2'"),
        ({"ids": ["a", "a"]}, "ids\\[1\\] must be a list of distinct ids, got 'a', which occurs"),
        ({"ids": ["a", 7]}, "ids\\[1\\] must be a valid id, got 7, which is invalid: an id is a s"),
        ({"ids": ["a", "b\n"]}, "ids\\[1\\] must be a valid id, got 'b\\\\n', which is invalid"),
        ({"ids": ["a", ""]}, "ids\\[1\\] must be a valid id"),
        ({"vectors": [np.ones((2, DIM)), np.ones((2, 3))]}, "vectors\\[1\\] must be an array"),
        ({"vectors": [np.ones((2, DIM)), np.ones((0, DIM))]}, "vectors\\[1\\] must be an array"),
        ({"vectors": [1.0, 2.0]}, "vectors\\[0\\] must be an array"),
        ({"vectors": [[[1.0] * DIM, [1.0]]] * 2}, "vectors\\[0\\] must be an array of numbers"),
        ({"vectors": [np.ones((2, DIM), complex)] * 2}, "vectors\\[0\\] must be an array of num"),
        ({"vectors": torch.ones(2, DIM, device="meta")}, "vectors\\[0\\] must be an array of num"),
        ({"vectors": [np.full((2, DIM), 1e38)] * 2}, "vectors\\[0\\] must be finite numbers"),
        ({"vectors": [np.zeros((2, DIM))] * 2}, "vectors\\[0\\] must be finite numbers .* zero"),
        ({"vectors": None}, "vectors must be a list, got None"),
        ({"ids": "ab"}, "ids must be a list, got 'ab'"),
        ({"ids": {"a", "b"}}, "ids must be a list"),
        ({"texts": "ab"}, "texts must be a list"),
        ({"texts": [b"a", "b"]}, "texts\\[0\\] must be a text in valid Unicode, or None, got b'a'"),
        ({"titles": ["a", "\udcff"]}, "titles\\[1\\] must be a text in valid Unicode"),
        ({"metadata": [None, "a"]}, "metadata\\[1\\] must be a JSON object or None, got 'a'"),
        ({"metadata": [{"a": np.float32(1)}, None]}, "metadata\\[0\\] must be a JSON object"),
        ({"metadata": [{"a": "\udcff"}, None]}, "metadata\\[0\\] must be a JSON object"),
        ({"metadata": [{"a": float("nan")}, None]}, "metadata\\[0\\] must be a JSON object"),
        ({"representations": []}, "representations must be a non-empty list"),
        ({"representations": [{"compressor": "none"}] * 2}, "representations must be unique"),
        ({"vectors": [np.ones((2, DIM)), np.full((2, DIM), np.nan)]}, "vectors\\[1\\] must be fin"),
        ({"vectors": [np.ones((2, DIM)), np.full((2, DIM), np.inf)]}, "vectors\\[1\\] must be fin"),
        ({"vectors": [np.ones((2, 3)), np.ones((2, 3))]}, "vectors must be 16 wide, as in the in"),
        ({"texts": ["a"]}, "texts must be a list of 2 values, one per id, got 'a list of 1'"),
    ],
)
def test_wrong_input_leaves_the_index_as_it_was(index, change, message):
    before = IndexReader(index.uri).dataset.to_table()
    arguments = {"ids": ["a", "b"], "vectors": items(2)}
    with pytest.raises(SpecError, match=f"^{message}"):
        index.add(**{**arguments, **change})
    assert IndexReader(index.uri).dataset.to_table().equals(before)
    index.add(**arguments)  # the lease is free
    assert len(index) == 14


@pytest.mark.parametrize("item_id", ["50 %", "a'b", "🙂", "x" * 255, "%20", 'a"b', "ü/../b"])
def test_unusual_ids(index, item_id):
    vectors = items(1, seed=9)
    for _ in range(2):
        index.add([item_id], vectors)
    assert index.search(vectors[0], k=1)[0].item_id == item_id
    assert index.delete([item_id]) == 1


def test_folders_with_other_contents(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(SpecError, match="index must be an index, or a new or empty folder"):
        Index(tmp_path)
    with pytest.raises(SpecError, match="index must be an index, or a new or empty folder"):
        Index(tmp_path / "notes.txt").add(["a"], items(1))
    with pytest.raises(SpecError, match="contains no index|does not exist"):
        Index(tmp_path / "new").search(np.ones((1, DIM)))


def test_lists_are_any_iterables_and_numbers_of_any_precision(index):
    texts = np.array(["a", "b"])
    index.add((name for name in "ab"), torch.ones(2, 3, DIM, dtype=torch.float64), texts)
    nested = torch.nested.nested_tensor([torch.ones(2, DIM), torch.ones(3, DIM)])
    index.add(["c", "d"], nested.half(), metadata=({"n": n} for n in range(2)))
    index.add({"e": 1, "f": 2}.keys(), [[[True] + [False] * (DIM - 1)], np.ones((4, DIM))[::-2]])
    assert {len(stored(index.uri)[name]) for name in "af"} == {3, 2}


@pytest.mark.parametrize("uri", [None, 5, "", "a\0b", "x" * 300, b"x"])
def test_locations_that_are_none(uri):
    with pytest.raises(SpecError, match="^index must be a path or a URI"):
        Index(uri)
    with pytest.raises(SpecError, match="^path must be a path or a URI"):
        folder_spec([uri])


def test_a_relative_location_is_that_of_the_first_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index = Index("library")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    index.add(["a"], items(1))
    assert len(Index(tmp_path / "library")) == 1


def test_wrong_queries(index):
    for query in (None, 5, {"a"}, (q for q in ["a"])):
        with pytest.raises(SpecError, match="query must be a text, an image, vectors, or a list"):
            index.search(query)
    index = Index(index.uri, encode_queries=lambda texts: [])
    with pytest.raises(SpecError, match="encode_queries must be a function that returns 1 arr"):
        index.search("text")
    with pytest.raises(SpecError, match="compressor.name must be"):
        index.compress(None)


def test_an_index_of_an_encoder_takes_no_vectors(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a text")
    spec = {"index": str(tmp_path / "index"), "representations": [{"compressor": "none"}]}
    spec["source"] = {"name": "text", "path": str(tmp_path / "texts")}
    job.run(parse(IndexSpec, spec), IndexResources(), job="job")
    index = Index(tmp_path / "index")
    assert index.search("text", k=1)[0].item_id == "a.txt"
    with pytest.raises(SpecError, match="index must be an index of given vectors, got .* minilm"):
        index.add(["b"], [np.ones((1, 384))])


def test_two_writers(index):
    with (
        Session(index.uri, Spec(), "test", "other", dict),
        pytest.raises(LeaseHeld, match="is being written by"),
    ):
        index.add(["a"], items(1))
    index.add(["a"], items(1))


def test_a_version_cannot_be_changed(index):
    old = Index(index.uri, version=index.reader.version)
    with pytest.raises(SpecError, match="version must be null for an index that is changed"):
        old.add(["a"], items(1))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "full"])
def test_a_killed_call_and_a_full_disk_leave_the_index_as_it_was(index, end):
    before = IndexReader(index.uri).dataset.to_table()
    program = f"""
        import os, resource, signal, sys
        import numpy as np
        from pipeline import Index
        from pipeline.index.writer import IndexWriter

        if "{end}" == "kill":
            IndexWriter.commit = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        vectors = np.random.default_rng(0).standard_normal((500, 40, {DIM})).astype(np.float32)
        Index({index.uri!r}).add([f"new-{{i}}" for i in range(500)], vectors)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 1), done.stderr
    assert IndexReader(index.uri).dataset.to_table().equals(before)
    if end == "full":
        assert "File too large" in done.stderr
        index.add(["new"], items(1))
        assert len(index) == 13


def test_import_is_fast():
    program = "import time; t = time.time(); import pipeline; print(time.time() - t)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert float(done.stdout) < 0.5
