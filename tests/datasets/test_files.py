"""Readers of annotation files."""

from __future__ import annotations

from pipeline.datasets.files import read_csv


def test_csv_quoting(tmp_path):
    path = tmp_path / "q.csv"
    path.write_bytes(b'id,query\r\n\r\n1,"a, ""b""\r\nc"\r\n2,d\r\n')
    rows = list(read_csv(str(path), ("query",), "path"))
    assert rows == [
        (f"line 4 of {path}", {"query": 'a, "b"\r\nc'}),
        (f"line 5 of {path}", {"query": "d"}),
    ]
