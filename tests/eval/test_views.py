"""What the figures show, from results given by hand, and that they are drawn."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from pipeline.eval import html
from pipeline.eval.figures import drawings
from pipeline.eval.plot import STYLES, Panel, quality_bytes_svg, styles
from pipeline.eval.results import Budget, merge_seeds, method_name
from pipeline.eval.views import (
    common_budget,
    correlations,
    in_scans,
    layer_scans,
    line_name,
    pool_scans,
    retention_lines,
    side_by_side,
)
from tests.eval.conftest import DIAGNOSIS, evaluation_of, result


def row(name, method, quality, osr, share=0.1, gini=0.5, **compressor):
    """A late row with the diagnosis that gives this OSR."""
    diagnosis = replace(DIAGNOSIS, pairs={"q0": [[osr, 1.0]]}, gini=gini, cv=200 * gini)
    return result(
        name,
        method,
        compressor.get("num_vectors"),
        quality=[quality] * 2,
        vectors_per_item=100 * share,
        vector_bytes=1e4 * share,
        compressor={"name": method.split()[0], **compressor},
        diagnosis=diagnosis,
    )


@pytest.fixture
def rows():
    full = row("full", "full", 0.8, 1.0, share=1.0)
    full = replace(full, compressor={"name": "none"})
    seeds = [
        row(f"random_{seed}", "random", 0.2 + 0.1 * seed, 0.5 + 0.1 * seed, ratio=0.1, seed=seed)
        for seed in range(3)
    ]
    scans = [
        row(f"{name}_{layer}", f"{name} layers=[{layer}]", 0.4, osr, ratio=0.1, layers=[layer])
        for name, osrs in (("sap", [0.6, 0.8, 0.9, 0.7]), ("eos", [0.5, 0.6]))
        for layer, osr in enumerate(osrs)
    ]
    return [
        full,
        *merge_seeds(seeds),
        *scans,
        row("hpool_10", "hpool", 0.7, 0.9, ratio=0.1, gini=0.25),
        row("hpool_20", "hpool", 0.8, 0.95, share=0.2, ratio=0.2),
        row("adaptive_10", "adaptive_eos", 0.4, 0.6, share=0.13, ratio=0.1, gini=1 / 3),
        row("hpool_k8", "hpool", 0.5, 0.7, num_vectors=8),
    ]


def test_scans_are_rows_that_differ_in_one_layer(rows):
    evaluation = evaluation_of(rows)
    sap, eos = layer_scans(evaluation)
    assert (sap.name, sap.budget, list(sap.rows)) == ("sap", Budget(None, 0.1), [0, 1, 2, 3])
    assert [r.retention.mean for r in eos.rows.values()] == [0.5, 0.6]
    assert in_scans(evaluation) == {r.name for r in rows if "layers" in r.method}
    # One layer alone, or at another budget, is no scan.
    alone = [row("a", "sap layers=[1]", 0.1, 0.1, ratio=0.3, layers=[1])]
    both = [row("b", "sap layers=[1, 2]", 0.1, 0.1, ratio=0.1, layers=[1, 2])]
    assert len(layer_scans(evaluation_of([*rows, *alone, *both]))) == 2


def test_the_budget_most_methods_have(rows):
    evaluation = evaluation_of(rows)
    assert common_budget(evaluation) == Budget(None, 0.1)
    assert [r.representation for r in side_by_side(evaluation)] == [
        "full",
        "random_0",
        "hpool_10",
        "adaptive_10",
    ]
    assert common_budget(evaluation_of(rows[:1])) is None
    assert [r.representation for r in side_by_side(evaluation_of(rows[:1]))] == ["full"]
    assert common_budget(evaluation_of(rows[-2:])) == Budget(8, None)


def test_retention_at_the_share_really_kept(rows):
    lines = retention_lines(evaluation_of(rows))
    assert set(lines) == {"random", "hpool", "adaptive_eos"}
    assert lines["hpool"] == [pytest.approx((0.1, 0.875, 0)), pytest.approx((0.2, 1.0, 0))]
    assert lines["adaptive_eos"] == [pytest.approx((0.13, 0.5, 0))]
    # Qualities 0.2, 0.3 and 0.4 of 0.8: mean 0.375, standard deviation 0.1 / 0.8.
    assert lines["random"] == [pytest.approx((0.1, 0.375, 0.125))]
    assert retention_lines(evaluation_of(rows[1:])) == {}


def test_correlations(rows):
    evaluation = evaluation_of([r for r in rows if "layers" not in r.method])
    osr, gini, cv = correlations(evaluation)
    x, y = [0.6, 0.9, 0.95, 0.6, 0.7], [0.3, 0.7, 0.8, 0.4, 0.5]
    assert osr.x.tolist() == pytest.approx(x)
    assert osr.r == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert 0 < osr.p < 0.05
    assert gini.of == "1/Gini at 10 %"
    assert gini.x.tolist() == pytest.approx([2.0, 4.0, 3.0])
    assert cv.x.tolist() == pytest.approx([1.0, 2.0, 1.5])
    assert gini.r == pytest.approx(np.corrcoef([2, 4, 3], [0.3, 0.7, 0.4])[0, 1])
    few = list(correlations(evaluation_of(rows[-2:])))
    assert [c.r for c in few] == [None] * 3


def test_methods_never_share_a_line(rows):
    other = replace(rows[-1], encoder="another")
    evaluation = evaluation_of([*rows, other])
    assert line_name(evaluation, rows[-1]) == "hpool, e1"
    assert line_name(evaluation, other) == "hpool, anothe"
    many = [row(f"m{i}", f"m{i}", 0.5, 0.5, num_vectors=4) for i in range(16)]
    looks = styles(evaluation_of(many))
    assert len({tuple(look.items()) for look in looks.values()}) == 16 == len(STYLES)


def test_a_colour_is_a_codec_and_a_marker_a_method():
    rows = []
    for codec in ({"name": "float16"}, {"name": "int8"}, {"name": "residual", "bits": 2}):
        for compressor in ("none", "hpool", "samer"):
            spec = {"name": compressor, "num_vectors": 8 if compressor != "none" else None}
            method = method_name(spec, codec)
            about = {"compressor": spec, "codec": codec, "vector_bytes": 100.0 * len(rows) + 1}
            rows.append(result(f"r{len(rows)}", method, spec["num_vectors"], **about))
    evaluation = evaluation_of(rows)
    drawn = styles(evaluation)
    assert len(drawn) == 8  # the full tokens in float16 have a look of their own
    colors = {name: style["color"] for name, style in drawn.items()}
    markers = {name: style["marker"] for name, style in drawn.items()}
    assert colors["hpool int8"] == colors["samer int8"] == colors["full int8"] != colors["hpool"]
    assert colors["samer residual bits=2"] not in (colors["samer"], colors["samer int8"])
    assert markers["hpool int8"] == markers["hpool"] != markers["samer int8"] == markers["samer"]
    panel = quality_bytes_svg(evaluation, Panel("late", "vector_bytes"))
    assert panel.count(">K=8<") == 6 and panel.count(">100 %<") == 2  # at each point


def reranked(pool: int, first: str, added: bool, quality: float):
    how = {"model": "m", "pool": pool, "add_first_stage": added, "precision": None}
    row = result(f"edje_{first}_{pool}_{added}", "edje", None, quality=[quality] * 2, score="edje")
    return replace(row, first_stage=first, rerank=how, compressor={})


def test_scans_over_pools_are_of_one_reranker_behind_one_first_stage(rows):
    more = [reranked(pool, "full.late", False, 0.5 + pool / 100) for pool in (20, 5, 10)]
    more += [reranked(pool, "full.late", True, 0.5) for pool in (5, 10)]
    more.append(reranked(10, "hpool_k8.late", False, 0.6))  # of one pool alone nothing is seen
    plain, added = pool_scans(evaluation_of([*rows, *more]))
    assert plain.first.name == "full.late" and list(plain.rows) == [5, 10, 20]
    assert [row.means["nDCG@10"] for row in plain.rows.values()] == [0.55, 0.6, 0.7]
    assert (plain.name, added.name) == (
        "EDJE after full.late",
        "EDJE after full.late, scores added",
    )
    assert not pool_scans(evaluation_of(rows))


def test_every_figure_is_drawn(rows):
    pools = [reranked(pool, "full.late", False, pool / 20) for pool in (5, 10)]
    evaluation = evaluation_of([*rows, *pools])
    drawn = {drawing.name: drawing for drawing in drawings(evaluation)}
    assert {name: len(drawing.panels) for name, drawing in drawn.items()} == {
        "index_utilisation": 4,
        "quality_retention": 1,
        "osr_by_layer": 1,
        "reranking_by_pool": 1,
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

    page = html.report([html.Section(evaluation, [])])
    assert "Score retention by layer" in page and "mean of 3 seeds" in page
    assert "±0.100" in page
    for used in set(re.findall(r'(?:url\(|href=")#([^")]+)', page)):
        assert page.count(f'id="{used}"') == 1, used


def test_without_diagnoses_there_is_no_figure(results):
    assert list(drawings(evaluation_of(results))) == []
