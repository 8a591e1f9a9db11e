"""Query files with texts and with vectors."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import SpecError
from pipeline.eval.topics import read_queries, read_query_vectors


def test_tab_separated(tmp_path):
    file = tmp_path / "queries.tsv"
    file.write_text("1\tlift of a wing\n2\tWärme\tund mehr\n", encoding="utf-8")
    assert read_queries(str(file)) == {"1": "lift of a wing", "2": "Wärme\tund mehr"}


@pytest.mark.parametrize("text", ["only an id\n", "\tonly a text\n", "1\t \n", "[1, 2]\n"])
def test_malformed_lines(tmp_path, text):
    (tmp_path / "queries.tsv").write_text(text)
    with pytest.raises(SpecError, match=r"\(line 1 of "):
        read_queries(str(tmp_path / "queries.tsv"))


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
