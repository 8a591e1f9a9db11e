"""k-means of faiss, with which codecs and candidate generators are fitted."""

from __future__ import annotations

import numpy as np

from pipeline import extras

#: Default maximum number of vectors per centroid that k-means uses, as in faiss.
MAX_PER_CENTROID = 256


def kmeans(
    vectors_TD: np.ndarray,
    num_centroids: int,
    *,
    iterations: int,
    seed: int,
    spherical: bool = False,
    max_per_centroid: int = MAX_PER_CENTROID,
) -> np.ndarray:
    """Returns the centroids (C, D) float32 of at least as many vectors.

    The lower 31 bits of `seed` are used. Centroids of `spherical` clusters have unit length. More
    than `max_per_centroid` vectors per centroid are sampled.
    """
    extras.require("faiss")
    import faiss  # only needed for fitting

    fitted = faiss.Kmeans(
        vectors_TD.shape[1],
        num_centroids,
        niter=iterations,
        spherical=spherical,
        seed=seed % 2**31,  # faiss requires a 31-bit seed
        min_points_per_centroid=1,
        max_points_per_centroid=max_per_centroid,
    )
    fitted.train(np.ascontiguousarray(vectors_TD, dtype=np.float32))
    assert fitted.centroids is not None  # set by train
    return fitted.centroids.reshape(num_centroids, -1).copy()
