"""Tables and the plot from results given by hand."""

import csv
import io
from dataclasses import replace

from matplotlib.image import imread

from pipeline.eval.report import (
    Result,
    aligned,
    markdown,
    method_name,
    metrics_csv,
    quality_bytes_png,
    table,
)

RESULT = Result("hpool_32", "hpool", 32, "late", {"nDCG@10": 0.41}, 31.5, 24192.0, 26000.0, 1234.5)
RESULTS = [
    replace(RESULT, representation="minilm_pooled", method="single", num_vectors=1, score="single"),
    replace(RESULT, representation="full", method="full", num_vectors=None, vector_bytes=150e3),
    RESULT,
    replace(RESULT, representation="hpool_16", num_vectors=16, vector_bytes=12e3),
    replace(RESULT, score="hybrid"),
]


def test_cells():
    header, *rows = table(RESULTS)
    row = dict(zip(header, rows[2], strict=True))
    assert row == {
        "representation": "hpool_32",
        "method": "hpool",
        "K": "32",
        "score": "late",
        "nDCG@10": "0.4100",
        "vectors/item": "31.5",
        "B/item": "24,192",
        "B/item all": "26,000",
        "queries/s": "1,234.5",
    }
    assert rows[1][2] == "all"


def test_plain_and_markdown_hold_every_cell():
    cells = table(RESULTS)
    lines = aligned(cells).splitlines()
    assert [line.split() for line in lines[1:]] == cells[1:]
    assert len({len(line) for line in lines}) == 1  # the last column is one of numbers
    assert markdown(cells).splitlines()[1] == "| " + " | ".join(["---"] * len(cells[0])) + " |"


def test_csv_is_not_rounded():
    rows = list(csv.DictReader(io.StringIO(metrics_csv(RESULTS))))
    assert [row["representation"] for row in rows] == [r.representation for r in RESULTS]
    assert float(rows[2]["queries_per_second"]) == 1234.5
    assert rows[1]["num_vectors"] == ""


def test_settings_that_are_not_defaults_name_another_method():
    plain = {"name": "random", "num_vectors": 8, "seed": 0}
    assert method_name(plain) == "random"
    assert method_name({**plain, "seed": 3}) == "random seed=3"


def test_plot_is_a_picture_whatever_there_is_to_draw():
    for results in (RESULTS, RESULTS[:1], RESULTS[1:2], RESULTS[4:]):
        picture = imread(io.BytesIO(quality_bytes_png(results, "nDCG@10")))
        assert picture.std() > 0.01
        assert min(picture.shape[:2]) > 500
