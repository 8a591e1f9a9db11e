"""Figures of results given by hand."""

import io
import re

from matplotlib.image import imread

from pipeline.report import html
from pipeline.report.figures import drawings
from pipeline.report.quality_bytes import Panel, quality_bytes_svg
from tests.eval.evaluations import diagnosed_rows, evaluation_of, reranked


def test_every_figure_is_drawn():
    depths = [reranked(depth, "full.late", False, depth / 20) for depth in (5, 10)]
    evaluation = evaluation_of([*diagnosed_rows(), *depths])
    drawn = {drawing.name: drawing for drawing in drawings(evaluation)}
    assert {name: len(drawing.panels) for name, drawing in drawn.items()} == {
        "index_utilisation": 4,
        "quality_retention": 1,
        "osr_by_layer": 1,
        "reranking_by_depth": 1,
        "diagnostics_quality": 3,
    }
    for drawing in drawn.values():
        picture = imread(io.BytesIO(drawing.png()))
        assert picture.std() > 0.01 and min(picture.shape[:2]) > 400
        for svg in drawing.svgs():
            assert svg.startswith("<svg") and "currentColor" in svg
    (layers,) = drawn["osr_by_layer"].svgs()
    for text in (">sap<", ">eos<", ">random (3 seeds)<", ">layer<"):
        assert text in layers
    assert ">sap layers" not in quality_bytes_svg(evaluation, Panel("late", "vector_bytes"))

    page = html.report([evaluation])
    assert "Score retention by layer" in page and "mean of 3 seeds" in page
    assert "±0.100" in page
    for used in set(re.findall(r'(?:url\(|href=")#([^")]+)', page)):
        assert page.count(f'id="{used}"') == 1, used


def test_without_diagnoses_there_is_no_figure(results):
    assert list(drawings(evaluation_of(results))) == []
