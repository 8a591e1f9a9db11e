"""Writes validation scenes as a collection that can be indexed and evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from examples.papers.synthetic.shapes_data import first_phrases, png, validation_scenes
from pipeline.runtime.atomic import write_atomic


def write_collection(folder: Path, count: int, series: int = 0) -> None:
    """Writes scenes as a benchmark; training evaluates on the validation series number 0.

    The folder contains:
        images/: one PNG per scene.
        queries.jsonl, qrels/test.tsv: one caption of two objects per scene, and all scenes that
            match it, in BEIR format.
        phrases.jsonl: the phrase for the first object of each caption, with the boxes of all
            matching objects.
    """
    scenes, captions, scene_C = validation_scenes(count, series)
    names = [f"scene-{row:05d}.png" for row in range(count)]
    for row, name in enumerate(names):
        write_atomic(str(folder / "images" / name), png(scenes.render(row)))
    queries = [{"_id": f"q{row}", "text": text} for row, text in enumerate(captions.texts)]
    qrels = ["query-id\tcorpus-id\tscore"]
    for query, scene in zip(*np.nonzero(captions.match(scenes)), strict=True):
        qrels.append(f"q{query}\t{names[scene]}\t1")
    phrases = first_phrases(scenes, captions, scene_C)
    phrase_rows = [
        {"item_id": names[row], "phrase": text, "boxes": boxes.round(6).tolist()}
        for text, row, boxes in zip(phrases.texts, phrases.documents, phrases.boxes, strict=True)
    ]
    write_atomic(str(folder / "queries.jsonl"), _lines(queries))
    write_atomic(str(folder / "qrels" / "test.tsv"), "\n".join(qrels) + "\n")
    write_atomic(str(folder / "phrases.jsonl"), _lines(phrase_rows))


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
