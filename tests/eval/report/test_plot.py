"""Line styles."""

from pipeline.eval.report.plot import STYLES, styles
from pipeline.eval.report.quality_bytes import Panel, quality_bytes_svg
from pipeline.eval.results import method_name
from tests.eval.evaluations import diagnosed, evaluation_of, result


def test_styles_are_unique():
    many = [diagnosed(f"m{i}", f"m{i}", 0.5, 0.5, num_vectors=4) for i in range(16)]
    line_styles = styles(evaluation_of(many))
    assert len({tuple(style.items()) for style in line_styles.values()}) == 16 == len(STYLES)


def test_colours_are_codecs_and_markers_are_methods():
    rows = []
    for codec in ({"name": "float16"}, {"name": "int8"}, {"name": "residual", "bits": 2}):
        for compressor in ("none", "hpool", "samer"):
            spec = {"name": compressor, "num_vectors": 8 if compressor != "none" else None}
            method = method_name(spec, codec)
            fields = {"compressor": spec, "codec": codec, "vector_bytes": 100.0 * len(rows) + 1}
            rows.append(result(f"r{len(rows)}", method, spec["num_vectors"], **fields))
    evaluation = evaluation_of(rows)
    line_styles = styles(evaluation)
    assert len(line_styles) == 8  # uncompressed float16 has its own style
    colors = {name: style["color"] for name, style in line_styles.items()}
    markers = {name: style["marker"] for name, style in line_styles.items()}
    assert colors["hpool int8"] == colors["samer int8"] == colors["full int8"] != colors["hpool"]
    assert colors["samer residual bits=2"] not in (colors["samer"], colors["samer int8"])
    assert markers["hpool int8"] == markers["hpool"] != markers["samer int8"] == markers["samer"]
    panel = quality_bytes_svg(evaluation, Panel("maxsim", "vector_bytes"))
    assert panel.count(">K=8<") == 6 and panel.count(">100 %<") == 2  # one label per point
