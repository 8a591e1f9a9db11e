"""The vectors source: file formats, rejects, and tables of items."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from pipeline.config import SpecError, parse
from pipeline.data import vector_files
from pipeline.data.base import items_table
from pipeline.data.vectors import Vectors
from pipeline.schema import ITEM, REJECT, Item, Reject, vectors_type

DIM = 4


def source(path: object, dim: int = DIM, **options: object) -> Vectors:
    return Vectors(
        parse(Vectors.Spec, {"name": "vectors", "path": str(path), "dim": dim, **options})
    )


def listed(vectors: Vectors) -> list[tuple[dict, int, Item | Reject]]:
    """Returns (shard, position, result) of all rows, after pickling and JSON round trips as in a
    job.
    """
    vectors = pickle.loads(pickle.dumps(vectors))
    shards = [json.loads(json.dumps(shard)) for shard in vectors.shards()]
    results = [(s, i, r) for s in shards for i, r in enumerate(vectors.scan(s))]
    pa.Table.from_pylist([r.row() for *_, r in results if isinstance(r, Item)], ITEM)
    pa.Table.from_pylist([r.row() for *_, r in results if isinstance(r, Reject)], REJECT)
    return results


def decoded(vectors: Vectors) -> dict[str, np.ndarray]:
    """Returns the vectors of all items, decoded shard by shard."""
    arrays = {}
    for shard in vectors.shards():
        wanted = [(i, r) for i, r in enumerate(vectors.scan(shard)) if isinstance(r, Item)]
        for (_, item), result in zip(wanted, vectors.decode(shard, wanted), strict=True):
            assert result.item_id == item.item_id
            assert result.revision == item.revision
            arrays[result.item_id] = result.payload["vectors"]
    assert all(a.dtype == np.float32 and a.shape[1:] == (DIM,) for a in arrays.values())
    return arrays


def corpus(num_items: int = 30, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, num_items)
    return {
        f"item-{i}": rng.standard_normal((n, DIM), dtype=np.float32) for i, n in enumerate(lengths)
    }


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(actual) == list(expected)
    for item_id, array in expected.items():
        np.testing.assert_array_equal(actual[item_id], array)


def write_npy(folder: Path, items: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    np.save(folder / "vectors.npy", np.concatenate(list(items.values())))
    np.save(folder / "lengths.npy", np.array([len(v) for v in items.values()]))
    (folder / "ids.txt").write_text("".join(f"{i}\n" for i in items))
    return folder


def table(items: dict[str, object], type: pa.DataType | None = None, **columns: list) -> pa.Table:
    vectors = [v.tolist() if isinstance(v, np.ndarray) else v for v in items.values()]
    type = type or vectors_type(DIM, pa.float32())
    return pa.table({"id": list(items), "vectors": pa.array(vectors, type), **columns})


@pytest.fixture(params=[3, 1000])
def shard_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Reads with shards and blocks of several sizes."""
    monkeypatch.setattr(vector_files, "ROWS_PER_SHARD", request.param)
    monkeypatch.setattr(vector_files, "ROWS_PER_BLOCK", 4)
    return request.param


def test_npy_with_equal_lengths(tmp_path: Path, shard_size: int):
    array = np.random.default_rng(0).standard_normal((10, 3, DIM))  # float64
    np.save(tmp_path / "vectors.npy", array)
    (tmp_path / "ids.txt").write_bytes("\ufeffä\r\n".encode() + b"b\nc\nd\ne\nf\ng\nh\ni\nlast")
    vectors = source(tmp_path)
    vectors.check()
    assert len(list(vectors.shards())) == -(-10 // shard_size)
    expected = dict(zip("äbcdefghi", array.astype(np.float32), strict=False))
    assert_equal(decoded(vectors), {**expected, "last": array[9].astype(np.float32)})
    item = listed(vectors)[0][2]
    assert (item.parent_id, item.modality, item.text, item.payload) == ("ä", "vectors", None, {})


def test_npy_with_one_vector_per_item(tmp_path: Path, shard_size: int):
    array = np.arange(5 * DIM, dtype=np.float16).reshape(5, DIM)
    np.save(tmp_path / "vectors.npy", array)
    (tmp_path / "ids.txt").write_text("a\nb\nc\nd\ne\n")
    vectors = source(tmp_path)
    vectors.check()
    assert_equal(
        decoded(vectors), dict(zip("abcde", array[:, None].astype(np.float32), strict=True))
    )


def test_npy_with_different_lengths(tmp_path: Path, shard_size: int):
    items = corpus()
    vectors = source(write_npy(tmp_path, items))
    vectors.check()
    assert_equal(decoded(vectors), items)


FORMS = {
    "fixed": vectors_type(DIM, pa.float32()),
    "lists": pa.list_(pa.list_(pa.float64())),
    "large": pa.large_list(pa.large_list(pa.float32())),
    "large-fixed": pa.large_list(pa.list_(pa.float32(), DIM)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_parquet_and_arrow_columns(tmp_path: Path, shard_size: int, form: str, suffix: str):
    items = corpus()
    path = tmp_path / f"items.{suffix}"
    if suffix == "parquet":
        pq.write_table(table(items, FORMS[form]), path, row_group_size=7)
    elif suffix == "feather":
        pyarrow.feather.write_feather(table(items, FORMS[form]), path, chunksize=7)
    else:
        with pa.ipc.new_file(path, table(items).schema) as writer:
            writer.write_table(table(items), max_chunksize=7)
    vectors = source(path)
    vectors.check()
    assert len(list(vectors.shards())) == (5 if shard_size == 3 else 1)
    assert_equal(decoded(vectors), items)


def test_parquet_folder_with_string_columns(tmp_path: Path):
    items = corpus(6)
    (tmp_path / "sub").mkdir()
    for name, rows in (("b.parquet", slice(0, 3)), ("sub/a.parquet", slice(3, 6))):
        part = dict(list(items.items())[rows])
        columns = table(
            part,
            title=pa.array(["t", None, "ü"]).dictionary_encode(),
            text=pa.array(["x", "y", None], pa.large_string()),
            parent_id=["p", None, ""],
            other=[1, 2, 3],
        ).rename_columns(["key", "multi", "title", "text", "parent_id", "other"])
        pq.write_table(columns, tmp_path / name)
    (tmp_path / "notes.txt").write_text("not read")
    vectors = source(tmp_path, id_column="key", vectors_column="multi")
    vectors.check()
    assert_equal(decoded(vectors), items)
    results = [r for *_, r in listed(vectors)]
    assert [(r.title, r.text, r.parent_id) for r in results[:3]] == [
        ("t", "x", "p"),
        (None, "y", "item-1"),
        ("ü", None, "item-2"),
    ]


def test_integer_ids(tmp_path: Path):
    pq.write_table(pa.table({"id": [7, 8], "vectors": [[[1.0] * DIM]] * 2}), tmp_path / "a.parquet")
    assert list(decoded(source(tmp_path))) == ["7", "8"]


@pytest.mark.parametrize("form", ["npy", "parquet", "arrow"])
def test_decodes_requested_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str):
    monkeypatch.setattr(vector_files, "ROWS_PER_BLOCK", 4)
    items = corpus(40)
    if form == "npy":
        path = write_npy(tmp_path, items)
    else:
        path = tmp_path / f"a.{form}"
        with pa.ipc.new_file(path, table(items).schema) as writer:
            writer.write_table(table(items), max_chunksize=9)
        if form == "parquet":
            pq.write_table(table(items), path, row_group_size=9)
    vectors = source(path)
    [shard] = vectors.shards()
    everything = list(enumerate(vectors.scan(shard)))
    for wanted in ([], [0], [39], [3, 4, 5, 17, 26, 27], list(range(40))):
        results = list(vectors.decode(shard, [everything[i] for i in wanted]))
        expected = {f"item-{i}": items[f"item-{i}"] for i in wanted}
        assert_equal({r.item_id: r.payload["vectors"] for r in results}, expected)


def test_any_fsspec_uri(tmp_path: Path):
    items = corpus()
    write_npy(tmp_path / "npy", items)
    pq.write_table(table(items), tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table(items), tmp_path / "a.feather")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/vectors", recursive=True)
    for path in ("npy", "a.parquet", "a.feather"):
        vectors = source(f"memory://vectors/{path}")
        vectors.check()
        assert_equal(decoded(vectors), items)
    memory.rm("/vectors", recursive=True)


def test_formats_have_equal_revisions(tmp_path: Path):
    items = corpus()
    write_npy(tmp_path, items)
    pq.write_table(table(items, FORMS["lists"]), tmp_path / "a.parquet")
    npy, parquet = (
        [r.revision for *_, r in listed(source(p))] for p in (tmp_path, tmp_path / "a.parquet")
    )
    assert npy == parquet
    assert len(set(npy)) == len(items)
    items["item-3"][0, 0] += 1
    changed = [r.revision for *_, r in listed(source(write_npy(tmp_path, items)))]
    assert [a == b for a, b in zip(npy, changed, strict=True)] == [i != 3 for i in range(30)]


BAD = {
    "good": [[1.0] * DIM],
    "nan": [[1.0] * DIM, [np.nan, 1, 1, 1]],
    "inf": [[np.inf] * DIM],
    "overflow": [[1e300] * DIM],
    "null number": [[1, 1, None, 1]],
    "null vector": [[1.0] * DIM, None],
    "narrow": [[1.0] * DIM, [1.0] * 3],
    "wide": [[1.0] * 6],
    "sums up": [[1.0] * 3, [1.0] * 5],
    "none": [],
    "null": None,
    "": [[1.0] * DIM],
    "tab\t": [[1.0] * DIM],
    "also good": [[2.0] * DIM] * 2,
}
REASONS = {
    "nan": ("non-finite vectors", "1 numbers are NaN or infinite as float32"),
    "inf": ("non-finite vectors", "4 numbers are NaN or infinite as float32"),
    "overflow": ("non-finite vectors", "4 numbers are NaN or infinite as float32"),
    "null number": ("non-finite vectors", "1 numbers are NaN or infinite as float32"),
    "null vector": ("wrong width", "0, expected 4"),
    "narrow": ("wrong width", "3, expected 4"),
    "wide": ("wrong width", "6, expected 4"),
    "sums up": ("wrong width", "3, expected 4"),
    "none": ("no vectors", ""),
    "null": ("no vectors", ""),
    "a.parquet:11": ("bad id", "'': an id is a string of 1 to 512 characters"),
    "a.parquet:12": (
        "bad id",
        "'tab\\t': an id must not contain control characters or unpaired surrogates",
    ),
}


def test_rejected_rows_of_columns(tmp_path: Path, shard_size: int):
    path = tmp_path / "a.parquet"
    pq.write_table(table(BAD, FORMS["lists"]), path, row_group_size=5)
    vectors = source(path)
    vectors.check()
    results = [r for *_, r in listed(vectors)]
    assert len(results) == len(BAD)
    rejects = {r.item_id: (r.reason, r.detail) for r in results if isinstance(r, Reject)}
    assert rejects == REASONS
    assert all(r.stage == "list" and not r.retryable for r in results if isinstance(r, Reject))
    # Positions of valid rows count the rejects before them.
    expected = {i: np.array(BAD[i], dtype=np.float32) for i in ("good", "also good")}
    assert_equal(decoded(vectors), expected)


def test_null_vectors_with_fixed_width(tmp_path: Path):
    rows = {"a": [[1.0] * DIM, None], "b": None, "c": [[1, 2, 3, None]], "d": [[3.0] * DIM]}
    pq.write_table(table(rows), tmp_path / "a.parquet")
    results = {r.item_id: r for *_, r in listed(source(tmp_path))}
    assert {i: r.reason for i, r in results.items() if isinstance(r, Reject)} == {
        "a": "wrong width",
        "b": "no vectors",
        "c": "non-finite vectors",
    }
    assert_equal(decoded(source(tmp_path)), {"d": np.full((1, DIM), 3, np.float32)})


def test_missing_and_non_utf8_strings(tmp_path: Path):
    latin = pa.StringArray.from_buffers(
        3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xe9c")
    )
    vectors = pa.array([[[1.0] * DIM]] * 3, FORMS["fixed"])
    pq.write_table(pa.table({"id": latin, "vectors": vectors}), tmp_path / "a.parquet")
    ids = pa.array(["x", None, "z"])
    with_text = pa.table({"id": ids, "vectors": vectors, "text": latin})
    pq.write_table(with_text, tmp_path / "b.parquet")
    results = [(r.item_id, getattr(r, "reason", None)) for *_, r in listed(source(tmp_path))]
    assert results == [
        ("a", None),
        ("a.parquet:1", "not UTF-8"),
        ("c", None),
        ("x", None),
        ("b.parquet:1", "not UTF-8"),
        ("z", None),
    ]
    pq.write_table(pa.table({"id": ids, "vectors": vectors}), tmp_path / "b.parquet")
    [*_, reject, _] = [r for *_, r in listed(source(tmp_path))]
    assert (reject.item_id, reject.reason) == ("b.parquet:1", "bad id")


def test_rejected_rows_of_npy(tmp_path: Path, shard_size: int):
    items = corpus(8)
    items["item-2"][0, 1] = np.nan
    items["item-5"] = np.empty((0, DIM), np.float32)
    folder = write_npy(tmp_path, items)
    lines = (folder / "ids.txt").read_bytes().replace(b"item-6", b"caf\xe9").splitlines()
    (folder / "ids.txt").write_bytes(b"\n".join([*lines[:7], b""]) + b"\n")
    vectors = source(folder)
    vectors.check()
    rejects = {r.item_id: r.reason for *_, r in listed(vectors) if isinstance(r, Reject)}
    assert rejects == {
        "item-2": "non-finite vectors",
        "item-5": "no vectors",
        "vectors.npy:6": "not UTF-8",
        "vectors.npy:7": "bad id",
    }
    for item_id in ("item-2", "item-5", "item-6", "item-7"):
        del items[item_id]
    assert_equal(decoded(vectors), items)


def test_corrupted_file_is_rejected(tmp_path: Path):
    for name in "abcd":
        pq.write_table(table({name: [[1.0] * DIM]}), tmp_path / f"{name}.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "b.parquet").write_bytes(b"")
    pq.write_table(pa.table({"other": [1]}), tmp_path / "c.parquet")
    vectors = source(tmp_path)
    with pytest.raises(
        SpecError,
        match=r"^id_column must be 'other', got 'id',"
        r" which is not a column",
    ):
        vectors.check()  # c.parquet is the first readable file
    *rejects, item = [r for *_, r in listed(vectors)]
    assert item.item_id == "d"
    assert [(r.item_id, r.reason, r.retryable) for r in rejects] == [
        (f"{name}.parquet:0", "unreadable file", True) for name in "abc"
    ]
    (tmp_path / "c.parquet").unlink()
    vectors.check()


def test_corrupted_row_group_ends_the_file(tmp_path: Path):
    path = tmp_path / "a.parquet"
    items = corpus(300)
    pq.write_table(table(items), path, row_group_size=100, compression="zstd", use_dictionary=False)
    metadata = pq.read_metadata(path)
    column = metadata.row_group(1).column(1)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 200] = b"\xff" * 200
    path.write_bytes(content)
    [shard] = source(path).shards()
    *results, reject = source(path).scan(shard)
    assert [r.item_id for r in results] == [f"item-{i}" for i in range(100)]
    assert (reject.item_id, reject.reason, reject.retryable) == (
        "a.parquet:100",
        "unreadable file",
        True,
    )


def test_invalid_arrow_offsets_do_not_crash(tmp_path: Path):
    path = tmp_path / "a.arrow"
    columns = table(corpus(50))
    with pa.ipc.new_file(path, columns.schema) as writer:
        writer.write_table(columns)
    offsets = columns["vectors"].chunk(0).offsets.to_numpy()[10:20].tobytes()
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, b"\x7f" * len(offsets)))
    vectors = source(path)
    [reject] = [r for *_, r in listed(vectors)]
    assert (reject.item_id, reject.reason) == ("a.arrow:0", "unreadable file")


def test_file_removed_before_decoding(tmp_path: Path):
    folder = write_npy(tmp_path, corpus(3))
    vectors = source(folder)
    [shard] = vectors.shards()
    wanted = list(enumerate(vectors.scan(shard)))
    (folder / "vectors.npy").unlink()
    rejects = list(vectors.decode(shard, wanted))
    assert [r.item_id for r in rejects] == ["item-0", "item-1", "item-2"]
    assert all(r.stage == "decode" and r.retryable and r.revision for r in rejects)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_file_truncated_before_decoding(tmp_path: Path, form: str):
    path = tmp_path / f"a.{form}"

    def write(columns: pa.Table) -> None:
        if form == "parquet":
            pq.write_table(columns, path)
        else:
            pyarrow.feather.write_feather(columns, path)

    items = corpus(3)
    write(table(items))
    vectors = source(path)
    [shard] = vectors.shards()
    wanted = list(enumerate(vectors.scan(shard)))
    write(table(items).slice(0, 2))
    *first, reject = vectors.decode(shard, wanted)
    assert [type(r) for r in first] == [Item, Item]
    assert (reject.item_id, reject.stage, reject.retryable) == ("item-2", "decode", True)


def test_check_of_npy_files(tmp_path: Path):
    def expect_error(match: str, dim: int = DIM, **files: object) -> None:
        for old in tmp_path.iterdir():
            old.unlink()
        for name, content in files.items():
            if isinstance(content, np.ndarray):
                np.save(tmp_path / f"{name}.npy", content)
            elif isinstance(content, bytes):
                (tmp_path / f"{name}.npy").write_bytes(content)
            else:
                (tmp_path / f"{name}.txt").write_text(content)
        with pytest.raises(SpecError, match=match):
            source(tmp_path, dim).check()

    array = np.ones((2, 3, DIM), np.float32)
    flat, lengths = np.ones((6, DIM), np.float32), np.array([2, 4])
    ids = "a\nb\n"
    expect_error(
        "a folder with vectors.npy and ids.txt, or a file or folder .*, which contains no vectors"
    )
    expect_error("contains no ids.txt", vectors=array)
    expect_error("contains no vectors.npy", ids=ids)
    expect_error("^dim must be 4, the width .*, got 128", 128, vectors=array, ids=ids)
    expect_error("has 1 ids and 2 rows of vectors.npy", vectors=array, ids="a\n")
    expect_error(
        "has 3 ids and 2 rows of lengths.npy", vectors=flat, lengths=lengths, ids="a\nb\nc"
    )
    expect_error("6 vectors and lengths of sum 5", vectors=flat, lengths=np.array([2, 3]), ids=ids)
    expect_error("has the length -1", vectors=flat, lengths=np.array([7, -1]), ids=ids)
    expect_error("lengths.npy as float64 of shape", vectors=flat, lengths=np.ones(2), ids=ids)
    expect_error(
        r"shape \(T, D\), got .* shape \(2, 3, 4\)", vectors=array, lengths=lengths, ids=ids
    )
    expect_error(r"shape \(n, N, D\) or .*, got .* shape \(4,\)", vectors=np.ones(DIM), ids=ids)
    expect_error("contains no items", vectors=array[:0], ids="")
    expect_error("Fortran order", vectors=np.asfortranarray(array), ids=ids)
    expect_error("dtype complex128", vectors=array.astype(complex), ids=ids)
    expect_error("dtype object", vectors=np.array([["a", None]]), ids=ids)
    expect_error("unreadable vectors.npy", vectors=b"no array", ids=ids)
    np.save(tmp_path / "vectors.npy", array)
    content = (tmp_path / "vectors.npy").read_bytes()
    expect_error("but the header requires", vectors=content[:-1], ids=ids)
    with pytest.raises(SpecError, match=r"^path must be .*does not exist"):
        source(tmp_path / "missing").check()
    with pytest.raises(SpecError, match=r"^dim must be .*got 0"):
        source(tmp_path, dim=0)


def test_check_of_column_files(tmp_path: Path):
    def expect_error(match: str, columns: pa.Table, **options: object) -> None:
        pq.write_table(columns, tmp_path / "a.parquet")
        with pytest.raises(SpecError, match=match):
            source(tmp_path, **options).check()

    good = table({"a": [[1.0] * DIM]})
    expect_error(
        "^id_column must be one of .*id, vectors, got 'key', which is not a column",
        good,
        id_column="key",
    )
    expect_error(
        "^vectors_column must be .*, got 'v', which is not a column", good, vectors_column="v"
    )
    expect_error("^dim must be 4, .*, got 128", good, dim=128)
    expect_error("contains no rows", good.slice(0, 0))
    expect_error(
        "^id_column must be a column of strings or integers, got 'id', which has the type double",
        pa.table({"id": [1.5], "vectors": [[[1.0]]]}),
    )
    expect_error(
        "^vectors_column must be a column of lists .* list<.*: double>",
        pa.table({"id": ["a"], "vectors": [[1.0]]}),
    )
    expect_error(
        "a file whose column text, if any, contains strings",
        good.append_column("text", pa.array([1])),
    )
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(SpecError, match=r"contains the unreadable a\.parquet"):
        source(tmp_path).check()
    stream = tmp_path / "stream.arrow"
    with pa.ipc.new_stream(stream, good.schema) as writer:
        writer.write_table(good)
    with pytest.raises(SpecError, match=r"contains the unreadable stream\.arrow"):
        source(stream).check()
    with pytest.raises(SpecError, match="contains no vectors"):
        source(Path(__file__)).check()


def write_documents(folder: Path, items: dict[str, np.ndarray], dtype: str = "<f4") -> Path:
    folder.mkdir(exist_ok=True)
    np.save(folder / "documents.npy", np.concatenate(list(items.values())).astype(dtype))
    np.save(folder / "doclens.npy", np.array([len(v) for v in items.values()], np.int32))
    np.save(folder / "doc_ids.npy", np.array(list(items)))
    return folder


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4"])
def test_documents(tmp_path: Path, shard_size: int, dtype: str):
    items = {name: array.astype(np.float16) for name, array in corpus().items()}
    np.save(tmp_path / "queries.npy", np.ones((2, 3, DIM)))  # not read
    vectors = source(write_documents(tmp_path, items, dtype))
    vectors.check()
    assert_equal(decoded(vectors), {name: a.astype(np.float32) for name, a in items.items()})
    assert len(list(vectors.shards())) == -(-30 // shard_size)


IDS = {
    "missing": (None, ["0", "1", "2", "3", "4"]),
    "integers": (np.array([7, -1, 2**40, 0, 3]), ["7", "-1", str(2**40), "0", "3"]),
    "unsigned": (np.arange(5, dtype=np.uint32), ["0", "1", "2", "3", "4"]),
    "strings": (np.array(["a", "ü", "日本", "d e", "x" * 40]), ["a", "ü", "日本", "d e", "x" * 40]),
    "bytes": (np.array([b"a", b"b", b"c", b"d", b"e"]), ["a", "b", "c", "d", "e"]),
}


@pytest.mark.parametrize("form", IDS)
def test_ids_of_documents(tmp_path: Path, shard_size: int, form: str):
    given, expected = IDS[form]
    folder = write_documents(tmp_path, corpus(5))
    (folder / "doc_ids.npy").unlink()
    if given is not None:
        np.save(folder / "doc_ids.npy", given)
    vectors = source(folder)
    vectors.check()
    assert_equal(decoded(vectors), dict(zip(expected, corpus(5).values(), strict=True)))


def test_documents_of_equal_length(tmp_path: Path):
    array = np.random.default_rng(0).standard_normal((5, 3, DIM), dtype=np.float32)
    np.save(tmp_path / "documents.npy", array)
    vectors = source(tmp_path)
    vectors.check()
    assert_equal(decoded(vectors), dict(zip("01234", array, strict=True)))


def test_documents_at_a_uri(tmp_path: Path):
    items = corpus()
    write_documents(tmp_path, items)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/documents", recursive=True)
    vectors = source("memory://documents")
    vectors.check()
    assert_equal(decoded(vectors), items)
    memory.rm("/documents", recursive=True)


def test_rejected_documents(tmp_path: Path, shard_size: int):
    items = corpus(8)
    items["item-2"][0, 1] = np.nan
    items["item-4"][0] = np.inf
    items["item-5"] = np.empty((0, DIM), np.float32)
    folder = write_documents(tmp_path, items)
    ids = np.array(list(items)).view(np.uint32).reshape(8, -1)
    ids[6, 0] = 0xD800
    np.save(folder / "doc_ids.npy", ids.view("<U6").reshape(-1))
    vectors = source(folder)
    vectors.check()
    rejects = {r.item_id: r.reason for *_, r in listed(vectors) if isinstance(r, Reject)}
    assert rejects == {
        "item-2": "non-finite vectors",
        "item-4": "non-finite vectors",
        "item-5": "no vectors",
        "documents.npy:6": "not UTF-8",
    }
    for name in ("item-2", "item-4", "item-5", "item-6"):
        del items[name]
    assert_equal(decoded(vectors), items)


def test_width_from_the_file(tmp_path: Path):
    options = {"name": "vectors", "path": str(write_documents(tmp_path, corpus()))}
    vectors = Vectors(parse(Vectors.Spec, options))
    vectors.check()
    assert (vectors.dim, vectors.payload) == (DIM, source(tmp_path).payload)
    assert_equal(decoded(vectors), corpus())
    pq.write_table(table(corpus()), tmp_path / "a.parquet")
    with pytest.raises(SpecError, match=r"^dim must be the width .*, unless .*, got None"):
        Vectors(parse(Vectors.Spec, {**options, "path": str(tmp_path / "a.parquet")})).check()
    with pytest.raises(SpecError, match=r"^path must be .*does not exist"):
        Vectors(parse(Vectors.Spec, {**options, "path": str(tmp_path / "none")})).check()


def test_planning_reads_no_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_documents(tmp_path, corpus(300))
    read = vector_files.NpyArray.values
    names = []

    def values(array: vector_files.NpyArray, start: int, end: int) -> np.ndarray:
        names.append(Path(array._path).name)
        return read(array, start, end)

    monkeypatch.setattr(vector_files.NpyArray, "values", values)
    vectors = source(folder)
    vectors.check()
    [shard] = vectors.shards()
    assert set(names) == {"doclens.npy", "doc_ids.npy"}
    list(vectors.scan(shard))
    assert "documents.npy" in names


def test_large_documents_are_read_in_blocks(tmp_path: Path):
    """Reads two items of a sparse file of 8 GiB."""
    num_items, length, width = 1 << 14, 1 << 10, 128
    with (tmp_path / "documents.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_items * length, width)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * num_items * length * width)
    np.save(tmp_path / "doclens.npy", np.full(num_items, length))
    tracemalloc.start()
    vectors = source(tmp_path, dim=width)
    vectors.check()
    shard = list(vectors.shards())[-1]
    item = Item(str(num_items - 1), "p", "s", "vectors", "r")
    positions = [0, shard["end"] - shard["row"] - 1]
    results = list(vectors.decode(shard, [(i, item) for i in positions]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [r.payload["vectors"].shape for r in results] == [(length, width)] * 2
    assert peak < 20e6


class Unpickled:
    """Object whose unpickling fails the test."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("unpickled",)


def test_check_of_documents(tmp_path: Path):
    def expect_error(match: str, **files: object) -> None:
        for old in tmp_path.iterdir():
            old.unlink()
        for name, content in files.items():
            if isinstance(content, bytes):
                (tmp_path / f"{name}.npy").write_bytes(content)
            else:
                np.save(tmp_path / f"{name}.npy", content, allow_pickle=True)
        with pytest.raises(SpecError, match=match) as caught:
            source(tmp_path).check()
        assert "\n" not in str(caught.value)

    flat, lengths = np.ones((6, DIM), np.float32), np.array([2, 4])
    good = {"documents": flat, "doclens": lengths}
    objects = np.array([Unpickled(), Unpickled()])
    expect_error("^path must be a folder with documents.npy, got .*contains no", doclens=lengths)
    expect_error("contains no doclens.npy", documents=flat)
    expect_error("contains no doclens.npy", documents=flat, doc_ids=np.array(["a", "b"]))
    expect_error("6 vectors and lengths of sum 5", documents=flat, doclens=np.array([1, 4]))
    expect_error("sums to the rows of documents.npy", documents=flat, doclens=np.array([1, 4]))
    expect_error("has the length -1", documents=flat, doclens=np.array([7, -1]))
    expect_error("doclens.npy as float64 of shape", documents=flat, doclens=np.array([2.0, 4]))
    expect_error("doclens.npy as int64 of shape", documents=flat, doclens=lengths[None])
    expect_error("unreadable doclens.npy .*object", documents=flat, doclens=objects)
    expect_error("dtype int64; use floats", documents=flat.astype(int), doclens=lengths)
    expect_error("unreadable documents.npy .*object", documents=objects, doclens=lengths)
    expect_error("unreadable doc_ids.npy .*dtype object", **good, doc_ids=objects)
    expect_error("dtype float64; use strings or integers", **good, doc_ids=np.ones(2))
    expect_error("has 3 ids and 2 rows of doclens.npy", **good, doc_ids=np.arange(3))
    expect_error(r"doc_ids.npy of shape \(2, 1\)", **good, doc_ids=np.ones((2, 1), int))
    expect_error("has the id 'a' more than once .row 1.", **good, doc_ids=np.array(["a", "a"]))
    expect_error("has the id '7' more than once", **good, doc_ids=np.array([7, 7]))
    expect_error("^dim must be 2, the width of documents.npy", **{**good, "documents": flat[:, :2]})
    expect_error(r"shape \(T, D\), got .* shape \(6,\)", documents=flat[:, 0], doclens=lengths)
    expect_error("contains no items", documents=flat[:0], doclens=lengths[:0])
    expect_error("Fortran order", documents=np.asfortranarray(flat), doclens=lengths)
    for name, array in (*good.items(), ("doc_ids", np.array(["a", "b"]))):
        np.save(tmp_path / "whole.npy", array)
        truncated = (tmp_path / "whole.npy").read_bytes()[:-1]
        expect_error(
            f"unreadable {name}.npy .*but the header requires", **{**good, name: truncated}
        )
        expect_error(f"unreadable {name}.npy", **{**good, name: b""})


@pytest.mark.parametrize("form", ["npy", "parquet", "arrow"])
def test_listing_memory_is_bounded(tmp_path: Path, form: str):
    array = np.ones((20_000, 10, 64), np.float32)  # 51 MB
    if form == "npy":
        path = tmp_path
        np.save(path / "vectors.npy", array)
        (path / "ids.txt").write_text("".join(f"{i}\n" for i in range(len(array))))
    else:
        path = tmp_path / f"a.{form}"
        flat = pa.FixedSizeListArray.from_arrays(array.reshape(-1), 64)
        offsets = np.arange(0, len(array) * 10 + 1, 10, dtype=np.int32)
        ids = [str(i) for i in range(len(array))]
        columns = pa.table({"id": ids, "vectors": pa.ListArray.from_arrays(offsets, flat)})
        if form == "parquet":
            pq.write_table(columns, path, compression="none", use_dictionary=False)
        else:
            with pa.ipc.new_file(path, columns.schema) as writer:
                writer.write_table(columns)
        del flat, columns
    del array
    vectors = source(path, dim=64)
    tracemalloc.start()
    arrow_before = pa.total_allocated_bytes()
    num_items, arrow_peak = 0, 0
    for shard in vectors.shards():
        for item in vectors.scan(shard):
            assert isinstance(item, Item)
            num_items += 1
            if num_items % 500 == 0:
                arrow_peak = max(arrow_peak, pa.total_allocated_bytes() - arrow_before)
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_items == 20_000
    assert python_peak + arrow_peak < 20e6


def test_items_table_equals_table_of_rows():
    payload = pa.schema(
        [pa.field("vectors", vectors_type(DIM, pa.float32())), pa.field("page", pa.int32())]
    )
    arrays = [np.full((n, DIM), n, np.float64) for n in (2, 0, 5)]
    items = [
        Item("a", "a", "s", "vectors", "r", payload={"vectors": arrays[0], "page": 1}),
        Item(
            "b",
            "p",
            "s",
            "vectors",
            "r",
            ("page", 1, 2),
            "t",
            "x",
            {"k": "ü"},
            {"vectors": arrays[1]},
        ),
        Item("c", "p", "s", "vectors", "r", payload={"vectors": arrays[2][::-1], "page": 3}),
    ]
    schema = pa.schema([*ITEM, *payload])
    for part in (items, items[:1], []):
        rows = [i.row() for i in part]
        for row in rows:
            row["vectors"] = row["vectors"].tolist()
        made = items_table(part, payload)
        made.validate(full=True)
        assert made.schema.equals(schema)
        assert made.equals(pa.Table.from_pylist(rows, schema))
    as_lists = [Item("a", "a", "s", "m", "r", payload={"vectors": [[1.0] * DIM], "page": None})]
    assert items_table(as_lists, payload)["vectors"].to_pylist() == [[[1.0] * DIM]]
    assert items_table([Item("a", "a", "s", "m", "r")], pa.schema([])).schema.equals(ITEM)


def test_items_table_rejects_wrong_width():
    payload = pa.schema([pa.field("vectors", vectors_type(DIM, pa.float32()))])
    item = Item("a", "a", "s", "m", "r", payload={"vectors": np.ones((1, 3), np.float32)})
    with pytest.raises(ValueError, match="must have 4 dimensions, got 3"):
        items_table([item], payload)


@pytest.mark.parametrize("missing", ["first", "last", "all"])
def test_items_table_of_sources_with_different_payloads(missing):
    """Not every source of a combined source has all payload columns."""
    words = pa.list_(pa.struct([("text", pa.string()), ("x", pa.float32())]))
    payload = pa.schema([pa.field("vectors", vectors_type(DIM, pa.float32())), ("words", words)])
    array = np.ones((2, DIM), np.float32)
    values = [{"text": "a", "x": 0.5}]
    full = [
        {"vectors": array, "words": pa.array(values, words.value_type)},
        {"vectors": array, "words": values},
        {"vectors": array[:0], "words": []},
    ]
    payloads = {"first": [{}, *full], "last": [*full, {}], "all": [{}, {}]}[missing]
    items = [Item(f"{i}", "p", "s", "text", "r", payload=v) for i, v in enumerate(payloads)]
    table = items_table(items, payload)
    table.validate(full=True)
    vectors = [v["vectors"].tolist() if v else None for v in payloads]
    assert table["vectors"].to_pylist() == vectors
    expected = [None if not v else values if len(v["words"]) else [] for v in payloads]
    assert table["words"].to_pylist() == expected
