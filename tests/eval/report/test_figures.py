"""Figures for given results."""

import io
import re

from matplotlib.image import imread

from pipeline.eval.report import html
from pipeline.eval.report.figures import figures
from pipeline.eval.report.quality_bytes import Panel, quality_bytes_svg
from tests.eval.evaluations import diagnosed_rows, evaluation_of, reranked


def test_draws_all_figures():
    depths = [reranked(depth, "full.maxsim", False, depth / 20) for depth in (5, 10)]
    evaluation = evaluation_of([*diagnosed_rows(), *depths])
    by_name = {figure.name: figure for figure in figures(evaluation)}
    assert {name: len(figure.panels) for name, figure in by_name.items()} == {
        "index_utilisation": 4,
        "quality_retention": 1,
        "osr_by_layer": 1,
        "reranking_by_depth": 1,
        "diagnostics_quality": 3,
    }
    for figure in by_name.values():
        image = imread(io.BytesIO(figure.file("png")))
        assert image.std() > 0.01 and min(image.shape[:2]) > 400
        for svg in figure.svgs():
            assert svg.startswith("<svg") and "currentColor" in svg
    (layers,) = by_name["osr_by_layer"].svgs()
    for text in (">sap<", ">eos<", ">random (3 seeds)<", ">layer<"):
        assert text in layers
    assert ">sap layers" not in quality_bytes_svg(evaluation, Panel("maxsim", "vector_bytes"))

    page = html.report([evaluation])
    assert "Score retention by layer" in page and "mean of 3 seeds" in page
    assert "±0.100" in page
    for element_id in set(re.findall(r'(?:url\(|href=")#([^")]+)', page)):
        assert page.count(f'id="{element_id}"') == 1, element_id


def test_no_figures_without_diagnoses(results):
    assert list(figures(evaluation_of(results))) == []
