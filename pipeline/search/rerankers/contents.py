"""Reads the contents of the candidates that rerankers score: texts, and images or video frames."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from pipeline.config import SpecError
from pipeline.index.reader import IndexReader
from pipeline.search.previews import Previews

#: An image with the start and end of its display, in seconds. Images of pages have no times (NaN).
TimedImage = tuple[Image.Image, float, float]
#: Maximum number of items whose images are in memory at the same time.
MAX_ITEMS = 32
#: Reasons why an item cannot be read.
NO_TEXT, NO_IMAGE = "has no text", "has no readable image"
TEXT_COLUMNS = ("text", "caption")


def has_content(index: IndexReader, problem: str) -> bool:
    """Checks whether any item lacks a problem: `NO_TEXT` or `NO_IMAGE`. Others are not checked."""
    stored = [f"{name} <> ''" for name in TEXT_COLUMNS if name in index.schema.names]
    filters = {
        NO_TEXT: " OR ".join(stored),
        NO_IMAGE: "modality NOT IN ('text', 'audio', 'vectors')",
    }
    condition = filters.get(problem)
    return any(batch.num_rows for batch in index.batches(["item_id"], filter=condition))


def item_texts(index: IndexReader, item_ids: Iterable[str]) -> dict[str, str]:
    """Returns the texts of items, such as transcripts, or the captions of items without a text.

    Items with neither are omitted.
    """
    unique = sorted(set(item_ids))
    if not unique:
        return {}
    columns = ["item_id", *(name for name in TEXT_COLUMNS if name in index.schema.names)]
    texts = {}
    for row in index.items(unique, columns).to_pylist():
        text = row.get("text") or row.get("caption")
        if text and text.strip():
            texts[row["item_id"]] = text
    return texts


class ItemImages:
    """Reads the images of items from their source, and caches those of the last items.

    Args:
        max_frames: Maximum number of frames per video.
    """

    def __init__(self, index: IndexReader, max_frames: int):
        self._index, self._max_frames = index, max_frames
        self._previews = Previews(index)
        self._cached: dict[str, list[TimedImage]] = {}

    def read(self, item_id: str) -> list[TimedImage]:
        """Returns the page, the image or frames of the video, or none if none can be read.

        The frames are evenly spaced among those that were indexed.
        """
        if item_id not in self._cached:
            if len(self._cached) >= MAX_ITEMS:
                self._cached.pop(next(iter(self._cached)))
            self._cached[item_id] = self._read(item_id)
        return self._cached[item_id]

    def _read(self, item_id: str) -> list[TimedImage]:
        columns = ["modality", "span", "metadata"]
        (item,) = self._index.item(item_id, columns).to_pylist()
        try:
            if item["modality"] != "video":
                return [(_open(self._previews.image(item_id)), np.nan, np.nan)]
            starts = self._times(item["span"] or {}, item["metadata"])
            ends = [*starts[1:], max(item["span"]["end"], starts[-1])]
            return [
                (_open(self._previews.image(item_id, start)), start, end)
                for start, end in zip(starts, ends, strict=True)
            ]
        except SpecError:  # no image, or the file is gone
            return []

    def _times(self, span: dict[str, float], metadata: str | None) -> list[float]:
        frames: Sequence[Sequence[float]] = json.loads(metadata or "{}").get("frames") or []
        times = [float(frame[1]) for frame in frames]
        if not times:  # indexed by its speech only
            edges = np.linspace(span["start"], span["end"], self._max_frames + 1)
            times = ((edges[1:] + edges[:-1]) / 2).tolist()
        number = min(len(times), self._max_frames)
        rows = np.linspace(0, len(times) - 1, number).round().astype(int)
        return [times[row] for row in rows]


def _open(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")
