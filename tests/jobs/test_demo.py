"""The demo's step of shapes, for real on few scenes: indexed, searched, lit, evaluated."""

import csv

import numpy as np
import pytest
from PIL import Image

from examples.papers.synthetic.shapes_files import write_collection
from jobs import demo
from pipeline.search.map_sheets import HIT_STEP, SHEET_STEP, TRUE_COLOUR


@pytest.mark.heavy
def test_scenes_are_indexed_searched_and_evaluated(cluster, tmp_path, capsys):
    folder, shown = str(tmp_path), {}

    def phase(name: str, run, *arguments: str) -> None:
        run(arguments)
        shown[name] = capsys.readouterr().out

    write_collection(tmp_path / "scenes", 12)
    demo.scenes(phase, f"{folder}/scenes", folder)
    # An image query finds the image itself.
    first = shown["search by image"].splitlines()[0]
    assert first.split()[::2] == ["1", "scene-00011.png"]
    for name in ("words", "image"):
        width, height = Image.open(tmp_path / "maps" / name / "1.png").size
        assert width == 448 and 448 <= height < 600  # the query is written below the map
    # The boxes of each phrase are framed under every representation.
    sheet = np.asarray(Image.open(tmp_path / "maps/phrases.png").convert("RGB")).astype(int)
    is_framed = (abs(sheet - TRUE_COLOUR) < 30).all(axis=2)
    assert sheet.shape[1] == 3 * SHEET_STEP
    for row in np.split(is_framed, 3):
        assert all(part.any() for part in np.split(row, 3, axis=1))

    rows = {}
    for name in ("index", "trained"):
        with (tmp_path / f"{name}_evaluation/metrics.csv").open() as file:
            rows[name] = {row["representation"]: row for row in csv.DictReader(file)}
        assert (tmp_path / f"{name}_evaluation/report.html").is_file()
    assert float(rows["index"]["full"]["nDCG@10"]) > 0.8  # of twelve scenes
    assert float(rows["trained"]["samer_16"]["vectors_per_item"]) == 16
    # Another projection: other vectors of the same scenes, and other relevance.
    before, after = (rows[name]["samer_16"]["coverage_iou"] for name in ("index", "trained"))
    assert before != after
    assert "samer_16.maxsim" in shown["compare"]
    # The scene that the caption is of is found first; before and after stand side by side.
    best = shown["search and rerank"].splitlines()[0]
    assert best.split()[::2][:2] == ["1", "scene-00000.png"] and "(was" in best
    assert Image.open(tmp_path / "edje.png").width > 5 * HIT_STEP
    assert float(rows["index"]["edje_10"]["nDCG@10"]) > float(rows["index"]["samer_8"]["nDCG@10"])
