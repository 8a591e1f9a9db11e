"""Relevance maps of phrases, and the grounding metrics that compare them with regions.

The metrics are defined in appendix C of the SaMer paper. The similarities of a phrase are drawn on
a grid over the page or image, which is compared with the bounding boxes of the phrase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.eval import Box

#: Number of grid cells per axis.
GRID_SIZE = 48
THRESHOLDS = np.arange(1, 10) / 10
#: Minimum IoU at which a region counts as found.
HIT_IOU = 0.05
EPSILON = 1e-6


class GroundingMetrics(NamedTuple):
    """Metrics of one relevance map, or their means (SaMer, equations 8 to 10)."""

    box_mass: float
    region_hit: float
    coverage_iou: float


def grounding_metrics(map_YX: np.ndarray, region_YX: np.ndarray) -> GroundingMetrics:
    """Computes how well a relevance map S fits a region G, with T = 0.1, 0.2, ..., 0.9.

        BoxMass     = sum_x S(x) G(x) / (sum_x S(x) + eps)
        RegionHit   = mean over t in T of [IoU(S >= t, G) >= 0.05]
        CoverageIoU = mean over t in T of  IoU(S >= t, G)

    Args:
        map_YX: Relevance map (Y, X) in [0, 1].
        region_YX: Region (Y, X), bool.

    >>> map, region = np.array([[1.0, 0.5], [0.0, 0.5]]), np.array([[True, False], [False, False]])
    >>> [round(value, 3) for value in grounding_metrics(map, region)]
    [0.5, 1.0, 0.63]
    """
    mass = float((map_YX * region_YX).sum() / (map_YX.sum() + EPSILON))
    above_TYX = map_YX >= THRESHOLDS[:, None, None] - 1e-9  # tolerates rounding
    intersection_T = (above_TYX & region_YX).sum(axis=(1, 2))
    union_T = (above_TYX | region_YX).sum(axis=(1, 2))
    iou_T = intersection_T / np.maximum(union_T, 1)
    return GroundingMetrics(mass, float((iou_T >= HIT_IOU).mean()), float(iou_T.mean()))


def region_mask(boxes: Sequence[Box], side: int = GRID_SIZE) -> np.ndarray:
    """Rasterises the union of boxes on the grid and returns it as a (Y, X) bool array.

    A box covers all cells with which it overlaps. Testing the centres of cells would miss lines of
    text, which are lower than a cell.

    >>> region_mask([(0.0, 0.0, 0.5, 0.1)], side=2).astype(int).tolist()
    [[1, 0], [0, 0]]
    """
    mask = np.zeros(side * side, bool)
    mask[_box_cells(np.array(boxes, float).reshape(-1, 4), side)[1]] = True
    return mask.reshape(side, side)


def relevance_map(
    similarity_T: np.ndarray, boxes_T4: np.ndarray, side: int = GRID_SIZE
) -> np.ndarray:
    """Computes the relevance of each cell as the maximum over the tokens that overlap with it.

    Args:
        similarity_T: Similarity of each input token with the phrase (T,), NaN for a token without a
            vector. Similarities are min-max scaled to [0, 1], or set to 1 if all are equal.
        boxes_T4: Box of each token as x0 y0 x1 y1 in [0, 1], NaN for a token without a location.
        side: Number of cells per axis.

    Returns:
        (side, side) float64 in [0, 1], rows from top to bottom, or 0 where no token overlaps.
    """
    valid_T = ~np.isnan(similarity_T)
    if not valid_T.any():
        return np.zeros((side, side))
    low, high = similarity_T[valid_T].min(), similarity_T[valid_T].max()
    scaled_T = (similarity_T - low) / (high - low) if high > low else np.ones(len(similarity_T))
    valid_T &= ~np.isnan(boxes_T4).any(axis=1)
    token_C, cell_C = _box_cells(boxes_T4[valid_T], side)
    relevance = np.zeros(side * side)
    np.maximum.at(relevance, cell_C, scaled_T[valid_T][token_C])
    return relevance.reshape(side, side)


def _box_cells(boxes_T4: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds all overlaps of boxes and cells and returns their indices, at least one per box.

    Cells are numbered row by row.

    >>> _box_cells(np.array([[0.0, 0.0, 0.4, 0.4], [0.6, 0.0, 0.7, 1.0]]), side=2)
    (array([0, 1, 1]), array([0, 1, 3]))
    """
    scaled = np.clip(boxes_T4, 0, 1) * side
    first = np.minimum(np.floor(scaled[:, :2] + 1e-6), side - 1).astype(int)
    last = np.maximum(np.ceil(scaled[:, 2:] - 1e-6).astype(int) - 1, first)
    width, height = (last - first + 1).T
    box_C = np.repeat(np.arange(len(first)), width * height)
    number_C = np.arange(len(box_C)) - np.repeat(
        np.cumsum(width * height) - width * height, width * height
    )
    x_C = first[box_C, 0] + number_C % width[box_C]
    y_C = first[box_C, 1] + number_C // width[box_C]
    return box_C, y_C * side + x_C
