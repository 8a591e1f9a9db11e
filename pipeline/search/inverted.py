"""Inverted lists of centroid codes, which select the items to score by `maxsim`.

Shapes: C centroids, S documents of a segment, M query tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipeline.search.packed import PackedVectors, Segment


class InvertedLists(NamedTuple):
    """Documents of a segment by centroid, in compressed sparse rows.

    The arrays may be memory-mapped.

    Attributes:
        offsets: (C + 1,) int64, first entry of each centroid in `documents`, then their number.
        documents: int32, ascending indices of the documents that contain each centroid. They
            include deleted documents.
    """

    offsets: np.ndarray
    documents: np.ndarray

    @classmethod
    def build(cls, segment: Segment, num_centroids: int) -> InvertedLists:
        """Sorts the documents of a segment by centroid.

        Args:
            segment: Documents whose vectors have the part `codes` (T, 1) uint16.
            num_centroids: Number of centroids C.
        """
        starts_S, lengths_S = segment.starts.numpy(), segment.lengths.numpy()
        segment.verify(segment.starts, segment.lengths)
        document_T = np.repeat(np.arange(len(lengths_S), dtype=np.int32), lengths_S)
        # Token t of the documents is row t + shift of the segment.
        shift_S = starts_S - (lengths_S.cumsum() - lengths_S)
        row_T = np.arange(len(document_T)) + np.repeat(shift_S, lengths_S)
        code_T = segment.parts["codes"].numpy()[row_T, 0]
        order_T = np.argsort(code_T, kind="stable")  # a radix sort
        code_T, document_T = code_T[order_T], document_T[order_T]
        is_first_T = np.ones(len(code_T), bool)
        is_first_T[1:] = (code_T[1:] != code_T[:-1]) | (document_T[1:] != document_T[:-1])
        counts_C = np.bincount(code_T[is_first_T], minlength=num_centroids)
        return cls(np.concatenate([[0], counts_C.cumsum()]), document_T[is_first_T])


class InvertedIndex:
    """Inverted lists of all segments of packed centroid codes.

    Args:
        packed: Centroid codes of all items.
        lists: Inverted lists of each segment of `packed`.
    """

    def __init__(self, packed: PackedVectors, lists: Sequence[InvertedLists]):
        assert len(lists) == len(packed.segments)
        self._segments, self._lists = packed.segments, tuple(lists)

    def probe(self, sim_MC: torch.Tensor, num_probes: int) -> torch.Tensor:
        """Finds the items that contain one of the best centroids of a query token.

        Args:
            sim_MC: Similarities of the tokens of a query and all centroids.
            num_probes: Number of centroids per query token, at least 1.

        Returns:
            Ascending positions of the items, (R,) int64. Deleted items have no position.
        """
        num_probes = min(num_probes, sim_MC.shape[1])
        centroids = sim_MC.topk(num_probes, dim=1, sorted=False).indices.unique().tolist()
        rows, first = [], 0
        for segment, lists in zip(self._segments, self._lists, strict=True):
            is_found_S = np.zeros(len(segment.lengths), bool)
            for centroid in centroids:
                begin, end = lists.offsets[centroid : centroid + 2]
                is_found_S[lists.documents[begin:end]] = True
            if segment.live is not None:
                is_found_S = is_found_S[segment.live.numpy()]
            rows.append(np.flatnonzero(is_found_S) + first)
            first += len(is_found_S)
        return torch.from_numpy(np.concatenate(rows))
