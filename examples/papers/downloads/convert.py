"""Conversions of data sets that are published in another form than tables read."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

#: Number of documents per query, as many as AGC trains with (section 6.2).
NUM_WAYS = 16
#: Names of the columns `video_id` and `caption` in the video retrieval tasks of MMEB-V2.
VIDEO_COLUMNS = ("video_id", "videoID", "id")
CAPTION_COLUMNS = ("caption", "enCap", "sentence")


def distillation_lists(source: Path, target: Path) -> None:
    """Writes pairs with negatives and scores from `queries`, `documents` and lists in `train`."""
    rows = _rows(source / "queries", ["query_id", "text"])
    queries = {str(row["query_id"]): row["text"] for row in rows}
    used: set[str] = set()
    target.mkdir(parents=True, exist_ok=True)
    with (target / "train.jsonl").open("w", encoding="utf-8") as file:
        for row in _rows(source / "train", ["query_id", "document_ids", "scores"]):
            ids = [str(name) for name in _list(row["document_ids"])[:NUM_WAYS]]
            pair = {"query": queries[str(row["query_id"])], "document_id": ids[0]}
            lists = {"negatives": ids[1:], "scores": _list(row["scores"])[:NUM_WAYS]}
            file.write(json.dumps({**pair, **lists}) + "\n")
            used.update(ids)
    with (target / "documents.jsonl").open("w", encoding="utf-8") as file:
        for row in _rows(source / "documents", ["document_id", "text"]):
            if (name := str(row["document_id"])) in used:
                file.write(json.dumps({"document_id": name, "text": row["text"]}) + "\n")


def _list(value: Any) -> list[Any]:
    """Returns a list, which some revisions contain as text."""
    found: list[Any] = ast.literal_eval(value) if isinstance(value, str) else value
    return found


def video_queries(source: Path, target: Path) -> None:
    """Writes a table with `video_id`, the name of a folder of frames, and its first `caption`."""
    rows = []
    for path in sorted(source.rglob("*")):
        for row in _file_rows(path):
            name = next((row[key] for key in VIDEO_COLUMNS if row.get(key) is not None), None)
            caption = next(row[key] for key in CAPTION_COLUMNS if row.get(key))
            rows.append(
                {
                    "video_id": str(Path(row["video"]).stem if name is None else name),
                    "caption": caption[0] if isinstance(caption, list) else caption,
                }
            )
    target.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), target / "test-00000-of-00001.parquet")


def _file_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a Parquet file, of a JSON list or of JSON lines. Other files have none."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix not in (".json", ".jsonl") or ".cache" in path.parts:
        return []
    text = path.read_text("utf-8")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _rows(folder: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of all Parquet files of a folder."""
    for path in sorted(folder.rglob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(10_000, columns=columns):
            yield from batch.to_pylist()
