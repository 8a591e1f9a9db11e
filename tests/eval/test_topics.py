"""Query files with texts and with vectors."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import SpecError
from pipeline.eval.topics import read_categories, read_queries, read_query_vectors


def test_tab_separated(tmp_path):
    file = tmp_path / "queries.tsv"
    file.write_text("1\tlift of a wing\n2\tWärme\tund mehr\n", encoding="utf-8")
    assert read_queries(str(file)) == {"1": "lift of a wing", "2": "Wärme\tund mehr"}


@pytest.mark.parametrize("text", ["only an id\n", "\tonly a text\n", "1\t \n", "[1, 2]\n"])
def test_malformed_lines(tmp_path, text):
    (tmp_path / "queries.tsv").write_text(text)
    with pytest.raises(SpecError, match=r"\(line 1 of "):
        read_queries(str(tmp_path / "queries.tsv"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"_id": "1", "text": "a", "m": ' + "[" * 100_000 + "]" * 100_000, "100 levels deep"),
        ('{"_id": "1", "text": "a", "m": ' + '{"a": ' * 101 + "1" + "}" * 102, "100 levels deep"),
        ('{"_id": "1", "text": ' + "[" * 5_000, "100 levels deep"),
        ('{"_id": ' + "9" * 5_000 + ', "text": "a"}', "at most 4,300 digits"),
        ('{"_id": "1", "text": "a", "m": NaN}', "NaN is not JSON"),
        ('{"_id": "1", "text": "a", "m": [-Infinity]}', "-Infinity is not JSON"),
        (r'{"_id": "1", "text": "\ud83d"}', "surrogates not allowed"),
        (r'{"_id": "1", "text": "a", "m": "\udc00"}', "surrogates not allowed"),
        ('{"_id": "1", "text": "a"} []', "Extra data"),
        ('{"_id": "1", "text": "a\0"}', "Invalid control character"),
    ],
)
def test_json_is_parsed_with_the_checks_of_corpora(tmp_path, line, problem):
    """Also in the fields that are read as categories."""
    path = tmp_path / "queries.jsonl"
    path.write_text('{"_id": "0", "text": "fine"}\n' + line)
    for read in (read_queries, lambda path: read_categories(path, ["0", "1"])):
        with pytest.raises(SpecError, match=rf"which cannot be parsed \(.*{problem}.*\(line 2 of "):
            read(str(path))


@pytest.mark.parametrize("value", ["null", "true", "1.5", '["a"]', '{"a": 1}', '" "', '""'])
def test_ids_are_strings_or_integers(tmp_path, value):
    (tmp_path / "queries.jsonl").write_text(f'{{"_id": {value}, "text": "a"}}')
    with pytest.raises(SpecError, match=r"\(line 1 of "):
        read_queries(str(tmp_path / "queries.jsonl"))


def test_byte_order_marks_and_other_encodings(tmp_path):
    path = tmp_path / "queries.jsonl"
    path.write_text('\ufeff{"_id": 1, "text": "a"}\n\ufeff{"_id": " 2 ", "text": "b"}\n', "utf-8")
    assert read_queries(str(path)) == {"1": "a", "2": "b"}
    path.write_bytes(b"1\ta\n2\t\xe4\n")
    with pytest.raises(SpecError, match=r"must be a UTF-8 file, .* which is malformed in line 2$"):
        read_queries(str(path))
    path.write_text("1\ta\n", "utf-16")
    with pytest.raises(SpecError, match=r"which is malformed in line 1$"):
        read_queries(str(path))


@pytest.mark.parametrize(
    ("header", "is_skipped"),
    [
        ("query-id\ttext", True),
        ("_id\tquery", True),
        ("QID\tQuestion", True),
        ("id\ttext\tlanguage", True),
        ("id\tidentity of a person", False),
        ("0\ttext", False),
    ],
)
def test_header_of_a_query_file_is_no_query(tmp_path, header, is_skipped):
    (tmp_path / "queries.tsv").write_text(f"{header}\n1\tlift\n")
    assert len(read_queries(str(tmp_path / "queries.tsv"))) == (1 if is_skipped else 2)


def test_vectors(tmp_path):
    query_vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(tmp_path / "one.npy", query_vectors)
    assert read_query_vectors(str(tmp_path / "one.npy"))["1"].tolist() == query_vectors.tolist()

    rows = {"id": [7, 8], "vectors": [query_vectors.tolist(), query_vectors[:1].tolist()]}
    for type in (pa.list_(pa.list_(pa.float32(), 2)), pa.list_(pa.list_(pa.float64()))):
        schema = pa.schema([("id", pa.int64()), ("vectors", type)])
        pq.write_table(pa.table(rows, schema), tmp_path / "many.parquet")
        read = read_query_vectors(str(tmp_path / "many.parquet"))
        assert {query_id: vectors.tolist() for query_id, vectors in read.items()} == {
            "7": query_vectors.tolist(),
            "8": query_vectors[:1].tolist(),
        }


def test_malformed_vectors(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([None, "a"]), allow_pickle=True)
    (tmp_path / "text.parquet").write_text("not Parquet")
    ids = pa.table({"id": ["1", "1"], "vectors": [[[1.0]], [[2.0]]]})
    pq.write_table(ids, tmp_path / "twice.parquet")
    ragged = pa.table({"id": ["1"], "vectors": [[[1.0], [1.0, 2.0]]]})
    pq.write_table(ragged, tmp_path / "ragged.parquet")
    pq.write_table(ids.drop_columns("vectors"), tmp_path / "lacking.parquet")
    names = ["objects.npy", "text.parquet", "twice.parquet", "ragged.parquet", "lacking.parquet"]
    for name in [*names, "nothing.npy"]:
        with pytest.raises(SpecError, match=r"^query_vectors must be ") as caught:
            read_query_vectors(str(tmp_path / name))
        assert "\n" not in str(caught.value)
