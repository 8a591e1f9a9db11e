"""Held-out shapes as a collection on disk, in the forms that jobs index and evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pipeline.atomic import write_atomic
from pipeline.synthetic.shapes_data import held_out, phrases_of, png


def write_collection(folder: Path, count: int, series: int = 0) -> None:
    """Writes scenes with their captions as a benchmark.

    The folder contains:
        images/: one PNG per scene.
        queries.jsonl, qrels/test.tsv: one caption of two objects per scene, and all scenes that it
            is true of, in the format of BEIR.
        phrases.jsonl: the phrase for the first object of each caption, with the boxes of all
            objects that it fits.

    Args:
        folder: Folder to write to.
        count: Number of scenes.
        series: Series of held-out scenes; training measures quality on series 0.
    """
    scenes, captions, scene_C = held_out(count, series)
    names = [f"scene-{row:05d}.png" for row in range(count)]
    for row, name in enumerate(names):
        write_atomic(str(folder / "images" / name), png(scenes.picture(row)))
    queries = [{"_id": f"q{row}", "text": text} for row, text in enumerate(captions.texts)]
    judged = ["query-id\tcorpus-id\tscore"]
    for query, scene in zip(*np.nonzero(captions.hold(scenes)), strict=True):
        judged.append(f"q{query}\t{names[scene]}\t1")
    phrases = phrases_of(scenes, captions, scene_C)
    grounded = [
        {"item_id": names[row], "phrase": text, "boxes": boxes.round(6).tolist()}
        for text, row, boxes in zip(phrases.texts, phrases.documents, phrases.boxes, strict=True)
    ]
    write_atomic(str(folder / "queries.jsonl"), _lines(queries))
    write_atomic(str(folder / "qrels" / "test.tsv"), "\n".join(judged) + "\n")
    write_atomic(str(folder / "phrases.jsonl"), _lines(grounded))


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
