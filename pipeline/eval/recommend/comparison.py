"""Measurements of the candidates with one set of queries."""

from __future__ import annotations

import numpy as np

from pipeline.config import SpecError, dump
from pipeline.eval.recommend.choose import Row
from pipeline.eval.recommend.measure import Measured
from pipeline.eval.recommend.queries import QuerySet
from pipeline.eval.recommend.sample import Sample
from pipeline.eval.significance import holm, randomisation_p, ratio_intervals
from pipeline.search.packed import PackedVectors
from pipeline.tokens import normalise

#: Maximum number of items whose covering radius is computed.
NUM_COVERED = 100
#: Significance level of `Comparison.better`.
LEVEL = 0.05


class Comparison:
    """Compares candidates with the uncompressed vectors.

    Attributes:
        values: Metric of each query (Q,) for each row.
        reference_Q: Metric of each query with uncompressed vectors.
    """

    def __init__(self, sample: Sample, full: Measured, queries: QuerySet, seed: int):
        self._sample, self._queries, self._seed = sample, queries, seed
        self._full_bytes = full.bytes_per_item
        self.rows: list[Row] = []
        self.values: list[np.ndarray] = []
        self.reference_Q = queries.measure(full.scores(queries.tokens), sample.ids)
        if not self.reference_Q.any():
            rule = "a benchmark with relevant items that the uncompressed vectors find"
            name = full.representation.id
            raise SpecError("queries", name, rule, "retrieves no relevant item")
        last = len(full.packed) - 1
        positions = np.linspace(0, last, min(NUM_COVERED, last + 1)).round().astype(int)
        self._covered = {
            row: normalise(full.packed.item(row)) for row in np.unique(positions).tolist()
        }

    def add(self, candidate: Measured) -> Row:
        """Measures a candidate, appends its row and returns it."""
        representation = candidate.representation
        values_Q = self._queries.measure(candidate.scores(self._queries.tokens), self._sample.ids)
        low, high = ratio_intervals(values_Q[np.newaxis], self.reference_Q, seed=self._seed)[0]
        mean_distance, max_distance = self._covering(candidate.packed)
        self.values.append(values_Q)
        row = Row(
            name=representation.id,
            method=representation.compressor.name,
            num_vectors=getattr(representation.compressor, "num_vectors", None),
            codec=dump(representation.codec),
            vectors_per_item=candidate.vectors_per_item,
            bytes_per_item=candidate.bytes_per_item,
            milliseconds=candidate.milliseconds(self._queries.tokens, self._sample.num_items),
            quality=float(values_Q.mean()),
            retained=float(values_Q.mean() / self.reference_Q.mean()),
            low=float(low),
            high=float(high),
            mean_distance=mean_distance,
            max_distance=max_distance,
        )
        self.rows.append(row)
        return row

    def better(self) -> list[Row]:
        """Returns the rows that are smaller and significantly better than uncompressed vectors.

        The p values of randomisation tests are corrected for the number of rows (Holm), because
        the best of many rows is often better by chance. Pseudo-queries are made from uncompressed
        vectors and therefore show nothing: the result is empty.
        """
        if not self._queries.is_judged or not self.rows:
            return []
        gains_RQ = np.stack(self.values) - self.reference_Q
        p_values = holm(randomisation_p(gains_RQ, seed=self._seed).tolist())
        return [
            row
            for row, gain, p_value in zip(self.rows, gains_RQ.mean(axis=1), p_values, strict=True)
            if gain > 0 and p_value < LEVEL and row.bytes_per_item < self._full_bytes
        ]

    def _covering(self, packed: PackedVectors) -> tuple[float, float]:
        """Returns mean and largest cosine distance of tokens to the nearest vector."""
        distances = [
            1 - (tokens_ND @ normalise(packed.item(row)).T).amax(dim=1)
            for row, tokens_ND in self._covered.items()
        ]
        mean = np.mean([float(distance_N.mean()) for distance_N in distances])
        radius = np.mean([float(distance_N.max()) for distance_N in distances])
        return max(0.0, float(mean)), max(0.0, float(radius))
