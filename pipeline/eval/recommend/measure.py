"""Compression and scoring of the candidates in memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from pipeline.compression import Compressor
from pipeline.compression.codecs import Codec
from pipeline.eval.recommend.sample import Sample
from pipeline.index.columns import Representation
from pipeline.index.info import EncoderInfo
from pipeline.index.token_columns import with_taps
from pipeline.registry import CODECS, COMPRESSORS
from pipeline.search.maxsim import maxsim
from pipeline.search.packed import PackedVectors, join_blocks
from pipeline.tokens import TokenBatch, flat_rows

#: Number of vectors that are scored to measure the time of a query. Fewer would measure the
#: overhead of a call.
TIMED_VECTORS = 1 << 17
#: Number of queries that are timed. The fastest is reported, as other processes slow down the
#: others.
NUM_TIMED_QUERIES = 5

#: Parts of the quantised vectors of a batch, and the number of vectors per item (B,).
Block = tuple[dict[str, np.ndarray], np.ndarray]


class Measured(NamedTuple):
    """Candidate that has been compressed and packed.

    Attributes:
        compressor: Compressor, which may transform queries.
        packed: Quantised vectors of the sampled items, in their order.
    """

    representation: Representation
    compressor: Compressor
    packed: PackedVectors

    @property
    def vectors_per_item(self) -> float:
        """Mean number of vectors per item."""
        return self.packed.num_vectors / len(self.packed)

    @property
    def bytes_per_item(self) -> float:
        """Mean number of bytes of the vectors of an item."""
        return self.vectors_per_item * self.packed.codec.token_bytes(self.packed.dim)

    def scores(self, queries: Sequence[torch.Tensor]) -> torch.Tensor:
        """Computes the MaxSim scores (Q, B) of queries with unit vectors (M, D)."""
        return maxsim(self._transformed(queries), self.packed)

    def milliseconds(self, queries: Sequence[torch.Tensor], num_items: int) -> float:
        """Measures the time to score a single query against an index on this machine.

        The sampled items are repeated up to `num_items`, or until they have `TIMED_VECTORS`
        vectors. The time is extrapolated linearly to `num_items`.
        """
        (segment,) = self.packed.segments
        needed = min(num_items / len(self.packed), TIMED_VECTORS / max(1, self.packed.num_vectors))
        repeated = PackedVectors([segment] * max(1, round(needed)))
        seconds = []
        for query in self._transformed(queries[:NUM_TIMED_QUERIES]):
            start = time.perf_counter()
            maxsim([query], repeated)
            seconds.append(time.perf_counter() - start)
        return 1000 * min(seconds) * num_items / len(repeated)

    def _transformed(self, queries: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        codec = self.packed.codec
        return [codec.transform_queries(self.compressor.transform_queries(q)) for q in queries]


def measured_candidates(
    representations: Sequence[Representation], sample: Sample, encoder_info: EncoderInfo
) -> Iterator[Measured]:
    """Compresses the sample with one candidate after another.

    Candidates with the same compressor must be adjacent, so that their tokens are compressed once.
    The vectors of only one batch are in single precision at a time.
    """
    for spec, adjacent in itertools.groupby(representations, key=lambda r: r.compressor):
        compressor = COMPRESSORS.build(spec)
        group: list[tuple[Representation, Codec, list[Block]]] = [
            (representation, CODECS.build(representation.codec), []) for representation in adjacent
        ]
        for batch in sample.batches:
            vectors_TD, lengths_B = compress(compressor, batch, encoder_info)
            for _, codec, blocks in group:
                parts = codec.quantise(vectors_TD)
                blocks.append(({name: part.numpy() for name, part in parts.items()}, lengths_B))
        for representation, codec, blocks in group:
            packed = join_blocks(codec, vectors_TD.shape[1], blocks)
            yield Measured(representation, compressor, packed)


def compress(
    compressor: Compressor, batch: TokenBatch, encoder_info: EncoderInfo
) -> tuple[torch.Tensor, np.ndarray]:
    """Returns vectors (T, D) float32 and the number of vectors per item (B,) int64."""
    batch = replace(batch, vectors=batch.vectors.float())
    result = compressor.compress(with_taps(batch, compressor.needs_taps, encoder_info))
    vectors_TD, lengths_B = flat_rows(result.vectors, result.mask)
    return vectors_TD.float(), lengths_B
