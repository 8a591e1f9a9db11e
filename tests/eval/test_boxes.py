"""Validation of boxes."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.eval.boxes import check_boxes


def test_check_boxes():
    assert check_boxes([[0, 0, 1.0005, 1]], "boxes", "line 1").tolist() == [[0, 0, 1, 1]]
    assert check_boxes([], "boxes", "line 1").shape == (0, 4)
    for boxes in (
        [[0, 0, np.nan, 1]],
        [[-0.5, 0, 1, 1]],
        [[0, 0, 640, 1]],
        ["x"],
        5,
        [[1, 0, 0, 1]],
    ):
        with pytest.raises(SpecError, match=r"^boxes must be boxes .*, got .* \(line 1\)"):
            check_boxes(boxes, "boxes", "line 1")
