"""Bounding boxes of objects in images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config import SpecError

#: The value of images without boxes.
NO_BOXES = np.zeros((0, 4), np.float32)
#: Minimum area of a box relative to the image. Smaller ones are ignored, as in SaMer's code.
MIN_AREA = 0.005
#: Number of pixels by which a box may exceed its image, because annotations are rounded.
TOLERANCE = 1.0


def check_boxes(boxes: Any, field: str, location: str) -> np.ndarray:
    """Validates boxes x0 y0 x1 y1 relative to the image size and returns them (M, 4) float64."""
    problem = None
    try:
        found = np.asarray(boxes, dtype=np.float64).reshape(len(boxes), 4)
    except (TypeError, ValueError):
        found, problem = np.zeros((0, 4)), "are malformed"
    clipped = found.clip(0, 1)
    if (found > 2).any():
        problem = "are in pixels"
    elif not (abs(found - clipped) <= 1e-3).all():  # True for NaN too
        problem = "exceed the image"
    elif (clipped[:, :2] >= clipped[:, 2:]).any():
        problem = "have no area"
    if problem:
        rule = "boxes [x0, y0, x1, y1] with 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1"
        raise SpecError(field, boxes, rule, problem, f" ({location})")
    return clipped


def normalise_box(
    box: Sequence[float], width: float, height: float, field: str, location: str
) -> np.ndarray:
    """Converts a box x0 y0 x1 y1 from pixels to fractions of the image size, (4,).

    >>> normalise_box([10, 0, 20.5, 50], 20, 50, "path", "line 1").tolist()
    [0.5, 0.0, 1.0, 1.0]
    """
    found = np.asarray(box, dtype=np.float64)
    size = np.array([width, height, width, height], dtype=np.float64)
    if not ((found >= -TOLERANCE) & (found <= size + TOLERANCE)).all():
        rule = f"a box within the image of {width:g} x {height:g} pixels"
        value = [float(side) for side in box]
        raise SpecError(field, value, rule, note=f" ({location})")
    return (found / size).clip(0, 1)


def drop_small_boxes(boxes: np.ndarray) -> np.ndarray:
    """Returns the boxes that are not too small, (M, 4) float32."""
    boxes = np.asarray(boxes, dtype=np.float32).reshape(-1, 4)
    return boxes[area(boxes) >= MIN_AREA]


def area(boxes: np.ndarray) -> np.ndarray:
    """Returns the areas (M,) of boxes (M, 4)."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
