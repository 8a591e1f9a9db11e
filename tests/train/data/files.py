"""Small training data on disk: the photos of the repository, in all formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import config
from pipeline.registry import TRAINING_DATA
from pipeline.train.data.base import Batch, TrainingData
from tests.conftest import ROOT

PHOTOS = ROOT / "jobs/data/photos"
IMAGES = PHOTOS / "images"
CAPTIONS = json.loads((PHOTOS / "captions.json").read_text("utf-8"))
NAMES = sorted(path.name for path in IMAGES.glob("*.jpg"))
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def build_data(batch_size: int = 4, seed: int = 0, **spec: Any) -> TrainingData:
    """Builds training data, as a training run does."""
    resolved = TRAINING_DATA.resolve({key: to_plain(value) for key, value in spec.items()})
    assert resolved == TRAINING_DATA.resolve(config.dump(resolved))
    return TRAINING_DATA.build(resolved, batch_size=batch_size, seed=seed)


def to_plain(value: Any) -> Any:
    """Converts paths to strings."""
    return str(value) if isinstance(value, Path) else value


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Writes JSON lines; strings are written as they are."""
    text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(text) + "\n", "utf-8")
    return path


def batch_values(batch: Batch) -> dict[str, Any]:
    """Converts a batch to values that can be compared."""
    return {
        "queries": list(batch.queries),
        "documents": [dict(document) for document in batch.documents],
        "keys": list(batch.document_keys),
        "query_labels": batch.query_labels.tolist(),
        "document_labels": batch.document_labels.tolist(),
        "boxes": batch.boxes and [boxes.tolist() for boxes in batch.boxes],
        "teacher": None if batch.teacher is None else str(batch.teacher.tolist()),
    }


def epoch_batches(
    data: TrainingData, epoch: int = 0, first: int = 0, worker: int = 0, of: int = 1
) -> list:
    """Returns the batches of an epoch as values."""
    return [batch_values(batch) for batch in data.batches(epoch, first, worker, of)]


def write_pages(folder: Path, *, rows: int = 12, group: int = 3) -> Path:
    """Writes Parquet files in ColPali's format, with two queries per photo."""
    folder.mkdir()
    names = [NAMES[row // 2] for row in range(rows)]
    table = pa.table(
        {
            "image": pa.array(
                [{"bytes": (IMAGES / name).read_bytes(), "path": name} for name in names],
                IMAGE_TYPE,
            ),
            "image_filename": [f"images/{name}" for name in names],
            "query": [f"What is in photo {row}?" for row in range(rows)],
            "answer": ["it"] * rows,
            "source": ["photos"] * rows,
        }
    )
    half = rows // 2
    pq.write_table(table.slice(0, half), folder / "train-00000-of-00002.parquet", group)
    pq.write_table(table.slice(half), folder / "train-00001-of-00002.parquet", group)
    pq.write_table(table.slice(0, 2), folder / "test-00000-of-00001.parquet")
    return folder
