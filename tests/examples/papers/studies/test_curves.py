"""Plot of learning curves."""

import io

import numpy as np
from matplotlib.image import imread

from examples.papers.studies.curves import curves_png


def test_curves_have_a_panel_per_metric_and_a_line_per_row():
    steps = np.array([0, 10, 20])
    rows = {
        "agc": {"R@1": (steps, np.array([[0.0, 0.5, 0.9], [0.1, 0.7, 0.8]]))},
        "memtok": {
            "R@1": (steps, np.array([[0.0, 0.1, 0.2]])),
            "nDCG@10": (steps, np.array([[0.1, 0.2, 0.3]])),
        },
    }
    two, one = (
        imread(io.BytesIO(curves_png(rows, names))) for names in (("R@1", "nDCG@10"), ("R@1",))
    )
    assert two.std() > 0.01 and two.shape[1] > 1.8 * one.shape[1]
