"""Light-ColPali's token merging, without its training: Ward on rounded cosine distances."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from pipeline.compression import Budget, Budgeted
from pipeline.compression.hpool import euclidean, group_means, linked, row_distances
from pipeline.tokens import TokenBatch, unit_vectors


class LightColPali(Budgeted["LightColPali.Spec"]):
    """Merges the tokens after the projection, by clusters of their cosine distances.

    The rows of the matrix of cosine distances are the observations of a Ward linkage, cut at K
    clusters, or fewer where merges tie; each becomes the mean of its tokens' unit vectors, at unit
    length. No token is protected: apart from that and the rounding it is `hpool` with
    `linkage: rows`.

    `distances` is the precision that the matrix is rounded to. The method's public code holds it
    in half precision, which is the default, "float16". Rounding depends on each entry, so that the
    distance of two rows is then one of N numbers and not of D. For 1030 tokens of 128 numbers that
    takes two and a half times as long as "float64", which does not round.
    """

    class Spec(Budget):
        """Settings of the compressor."""

        name: Literal["light_colpali"] = "light_colpali"
        distances: Literal["float16", "float64"] = "float16"
        """Precision of the distance matrix."""

    def reduce(self, batch: TokenBatch, budgets_B: torch.Tensor) -> TokenBatch:
        """`_compress` with a budget for each item."""
        distances = rounded_distances if self.spec.distances == "float16" else row_distances
        tokens_BND = unit_vectors(batch)
        support_BN = linked(tokens_BND, batch.lengths, budgets_B, distances, "ward")
        return group_means(batch, tokens_BND, support_BN, budgets_B)


def rounded_distances(tokens_ND: np.ndarray) -> np.ndarray:
    """The distances of the rows of the cosine distances, these rounded to float16; condensed."""
    cosine_NN = (1.0 - tokens_ND @ tokens_ND.T).clip(min=0.0)
    np.fill_diagonal(cosine_NN, 0.0)
    return euclidean(cosine_NN.astype(np.float16).astype(np.float64), tokens_ND)
