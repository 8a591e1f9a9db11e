"""Isotropy of token vectors: the mean cosine of different vectors of an index.

Token vectors of some models share a direction, with a mean cosine of up to 0.95 (LateOn). Scores
then differ little, and signs alone, for example, hardly distinguish items.
"""

from __future__ import annotations

import numpy as np

from pipeline.index.reader import IndexReader

#: Items and vectors of a sample. The vectors are evenly spaced among those of the items.
NUM_ITEMS, NUM_VECTORS = 512, 8192
#: Mean cosine from which vectors are said to share a direction.
SHARED = 0.5


def mean_cosine(index: IndexReader, representation: str) -> float | None:
    """Returns the mean cosine of pairs of vectors of a sample, or None for less than two vectors.

    For unit vectors x_1 to x_T, it is (|x_1 + ... + x_T|² - T) / (T (T - 1)).
    """
    vectors_TD, _ = sample_vectors(index, representation, NUM_ITEMS)
    vectors_TD = vectors_TD[:: max(1, len(vectors_TD) // NUM_VECTORS)].astype(np.float64)
    norms_T1 = np.linalg.norm(vectors_TD, axis=1, keepdims=True)
    unit_TD = vectors_TD[norms_T1[:, 0] > 0] / norms_T1[norms_T1 > 0][:, None]
    if (number := len(unit_TD)) < 2:
        return None
    total = unit_TD.sum(axis=0)
    return float((total @ total - number) / (number * (number - 1)))


def isotropy_remark(index: IndexReader, representation: str) -> str | None:
    """Returns a sentence if the vectors of a representation share a direction, else None."""
    cosine = mean_cosine(index, representation)
    if cosine is None or cosine < SHARED:
        return None
    return (
        f"the vectors of {representation} share a direction (mean cosine {cosine:.2f}): the codec"
        " bits allows for it, other codes may lose good items"
    )


def sample_vectors(
    index: IndexReader, representation: str, num_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vectors (T, D) of evenly spaced items, and their number per item (B,)."""
    info = index.representation(representation)
    rows = np.unique(np.linspace(0, max(len(index) - 1, 0), num_items).astype(int))[: len(index)]
    with index.corruption_errors():
        column = index.dataset.take(rows.tolist(), columns=[info.column])[info.column]
    return index.codec(representation).decode(column, info.dim)
