"""Writes pairs of reports as a collection that can be indexed and evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.papers.synthetic.binding import SIDE, Pair
from examples.papers.synthetic.shapes_data import png
from pipeline.runtime.atomic import write_atomic


def write_collection(folder: Path, pairs: Sequence[Pair], side: int = SIDE) -> None:
    """Writes pairs in the layout of an image task of MMEB-V2.

    The folder contains:
        images/: two PNGs per pair. The name of the hard negative is the smaller one, so that it
            has the better rank if the scores are equal.
        test.parquet: the queries, each with its report and the hard negative as candidates.
    """
    rows = []
    for number, pair in enumerate(pairs):
        names = [f"{number:03}-{role}.png" for role in ("positive", "negative")]
        for name, report in zip(names, (pair.positive, pair.negative), strict=True):
            write_atomic(str(folder / "images" / name), png(report.render(side)))
        candidates = {"tgt_text": ["", ""], "tgt_img_path": names}
        rows += [
            {"qry_text": text, "qry_img_path": "", **candidates} for text in pair.positive.queries
        ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "test.parquet")
