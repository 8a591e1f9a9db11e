"""Benchmarks with query vectors in .npy files."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.eval import JudgedQueries
from pipeline.registry import BENCHMARKS

DIM = 4
QRELS = "query-id\tcorpus-id\tscore\na\tx\t2\na\ty\t0\nc\tx\t1\nnone\tx\t1\n"
ARRAYS = [
    np.random.default_rng(i).standard_normal((n, DIM), np.float32) for i, n in enumerate((2, 3, 1))
]


def padded(arrays: list[np.ndarray]) -> np.ndarray:
    result = np.zeros((len(arrays), max(map(len, arrays)), DIM), np.float32)
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return result


def load(path: object, **fields: str) -> JudgedQueries:
    spec = BENCHMARKS.resolve({"name": "npy", "path": str(path), **fields})
    return BENCHMARKS.build(spec).load()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "queries.npy", padded(ARRAYS))
    np.save(tmp_path / "query_ids.npy", np.array(["a", "b", "c"]))
    (tmp_path / "qrels.tsv").write_text(QRELS)
    return tmp_path


def assert_loaded(judged: JudgedQueries) -> None:
    assert judged.queries == {"a": "", "c": ""} and not judged.has_texts
    assert judged.qrels == {"a": {"x": 2, "y": 0}, "c": {"x": 1}}
    assert (judged.num_unjudged, judged.num_without_text) == (1, 1)
    assert judged.vectors is not None and list(judged.vectors) == ["a", "c"]
    np.testing.assert_array_equal(judged.vectors["a"], ARRAYS[0])
    np.testing.assert_array_equal(judged.vectors["c"], ARRAYS[2])


def test_padded_queries(folder: Path):
    assert_loaded(load(folder))


def test_padded_queries_with_lengths(folder: Path):
    array = padded(ARRAYS)
    array[0, 2:] = 7  # padding need not be zero
    np.save(folder / "queries.npy", array)
    np.save(folder / "querylens.npy", np.array([2, 3, 1], np.int32))
    assert_loaded(load(folder))


def test_concatenated_queries(folder: Path):
    np.save(folder / "queries.npy", np.concatenate(ARRAYS))
    np.save(folder / "querylens.npy", np.array([2, 3, 1]))
    assert_loaded(load(folder))


def test_file_names_of_published_data_sets(folder: Path):
    (folder / "query_ids.npy").rename(folder / "queries_ids.npy")
    (folder / "qrels.tsv").rename(folder / "qrels.dev.small.tsv")
    assert_loaded(load(folder))


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_judgments_in_trec_format(folder: Path, separator: str):
    lines = ["a 0 x 2", "a 0 y 0", "c 0 x 1", "none 0 x 1"]
    text = "\n".join(lines).replace(" ", separator)
    (folder / "qrels.tsv").write_text(text)
    assert_loaded(load(folder))
    (folder / "qrels.tsv").rename(folder / "qrels.txt")
    assert_loaded(load(folder, qrels="qrels.txt"))


def test_row_numbers_and_integers_as_ids(folder: Path):
    (folder / "qrels.tsv").write_text("0\tx\t1\n2\tx\t1\n")
    (folder / "query_ids.npy").unlink()
    assert list(load(folder).queries) == ["0", "2"]
    np.save(folder / "query_ids.npy", np.array([2, 5, 0]))
    assert list(load(folder).queries) == ["2", "0"]


def test_remote_folder(folder: Path):
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/benchmark", recursive=True)
    assert_loaded(load("memory://benchmark"))
    memory.rm("/benchmark", recursive=True)


def test_malformed_folders(folder: Path):
    def expect_error(match: str, qrels: str | None = QRELS, **files: object) -> None:
        for old in folder.iterdir():
            old.unlink()
        for name, content in {"queries": padded(ARRAYS), **files}.items():
            if isinstance(content, bytes):
                (folder / f"{name}.npy").write_bytes(content)
            elif content is not None:
                np.save(folder / f"{name}.npy", content, allow_pickle=True)
        if qrels is not None:
            (folder / "qrels.tsv").write_text(qrels)
        with pytest.raises(SpecError, match=match) as caught:
            load(folder)
        assert "\n" not in str(caught.value)

    flat, lengths, ids = np.concatenate(ARRAYS), np.array([2, 3, 1]), np.array(["a", "b", "c"])
    objects = np.array([None, "a", "b"])
    not_finite = padded(ARRAYS)
    not_finite[0, 0, 0] = np.nan
    zeros = padded(ARRAYS)
    zeros[0] = 0
    expect_error("^benchmark.path must be .* has no queries.npy", queries=None)
    expect_error(r"of shape \(Q, M, D\), or \(T, D\) with querylens.npy, got", queries=flat)
    expect_error(r"has queries.npy of shape \(0, 3, 4\)", queries=padded(ARRAYS)[:0])
    expect_error("dtype int64; use floats", queries=np.ones((3, 2, DIM), int))
    expect_error("unreadable queries.npy .*dtype object", queries=objects)
    expect_error("unreadable queries.npy", queries=b"no array")
    expect_error("in the query 'a'", queries=not_finite, query_ids=ids)
    expect_error("in the query 'a'", queries=zeros, query_ids=ids)
    expect_error("dtype float64; use integers", querylens=lengths * 1.0)
    expect_error(
        r"querylens.npy of shape \(3,\) and sum 3, from 0 to 2", querylens=np.array([2, 0, 1])
    )
    expect_error(r"from -1 to 2", querylens=np.array([2, -1, 1]))
    expect_error(
        r"sum 5, from 1 to 2, and queries.npy of shape \(6, 4\)",
        queries=flat,
        querylens=np.array([2, 2, 1]),
    )
    expect_error("from 1 to 4", querylens=np.array([2, 4, 1]))
    expect_error(r"querylens.npy of shape \(2,\)", querylens=np.array([2, 2]))
    expect_error(r"3 queries and query_ids.npy of shape \(2,\)", query_ids=ids[:2])
    expect_error("unreadable query_ids.npy .*dtype object", query_ids=objects)
    expect_error("the id 'a' more than once", query_ids=np.array(["a", "b", "a"]))
    expect_error("has no judged queries", query_ids=np.array(["d", "e", "f"]))
    expect_error("a single .tsv file, got .*, which contains no .tsv file; set qrels", qrels=None)
    expect_error("^benchmark.qrels must be a line .* TREC .*line 1 of", qrels="a x\n")
    np.save(folder / "whole.npy", padded(ARRAYS))
    truncated = (folder / "whole.npy").read_bytes()[:-1]
    expect_error("unreadable queries.npy .*but the header requires", queries=truncated)
    with pytest.raises(SpecError, match=r"^benchmark.path must be .* does not exist"):
        load(folder / "missing")
    (folder / "queries.npy").unlink()
    np.save(folder / "queries.npy", padded(ARRAYS))
    with pytest.raises(SpecError, match=r"^benchmark.qrels must be .*none.tsv.* does not exist"):
        load(folder, qrels="none.tsv")
    (folder / "b.tsv").write_text(QRELS)
    with pytest.raises(SpecError, match=r"which contains b.tsv, qrels.tsv; set qrels"):
        load(folder)
