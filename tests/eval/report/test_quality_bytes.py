"""Plot of quality against bytes."""

import io

import pytest
from matplotlib.image import imread

from pipeline.eval.report.quality_bytes import (
    Panel,
    _figure,
    panels,
    quality_bytes_file,
    quality_bytes_svg,
)
from tests.eval.evaluations import evaluation_of, result


@pytest.mark.parametrize(("bm25", "is_line"), [(0.405, True), (0.05, False), (0.95, False)])
def test_distant_bm25_does_not_stretch_axis(bm25, is_line):
    """The other rows take at least half of the axis for any quality of BM25."""
    rows = [result(f"h{i}", num_vectors=i, quality=[0.4 + i / 100] * 2) for i in range(1, 6)]
    row = result("bm25", "bm25", None, "bm25", encoder="", quality=[bm25] * 2)
    figure = _figure(evaluation_of([row, *rows]), [Panel("maxsim", "vector_bytes")])
    (axis,) = figure.axes
    low, high = axis.get_ylim()
    assert 0.04 < high - low < 2 * 0.04
    assert (low <= bm25 <= high) == is_line
    labels = [line.get_label() for line in axis.get_lines()]
    texts = [text.get_text() for text in axis.texts]
    assert ("BM25" in labels) == is_line and (f"BM25: {bm25:.3f}" in texts) == (not is_line)


@pytest.mark.parametrize("rows", [slice(0, 6), slice(0, 2), slice(1, 2), slice(2, 3), slice(4, 5)])
def test_draws_any_rows(results, rows):
    evaluation = evaluation_of(results[rows])
    image = imread(io.BytesIO(quality_bytes_file(evaluation, "png")))
    assert image.std() > 0.01
    assert min(image.shape[:2]) > 500
    for panel in panels(evaluation):
        svg = quality_bytes_svg(evaluation, panel)
        assert svg.startswith("<svg") and "currentColor" in svg
        assert "<image" not in svg and "purl.org" not in svg
