"""Encoder that sleeps instead of running a model. Used to benchmark the rest of the pipeline."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.taps import Tap
from pipeline.tokens import TokenBatch, normalise, pad
from tests.tiny import SLEEPING


class Sleeping(Encoder["Sleeping.Spec"]):
    """Encoder that sleeps for each batch and derives vectors from the item ids.

    All items share one random matrix, whose rows and columns are rolled by a hash of the item id,
    which costs one copy. Search results are meaningless.
    """

    class Spec(config.ComponentSpec):
        """Latency and output size of the encoder.

        The defaults yield 264 kB per item.
        """

        name: str = SLEEPING
        seconds: float = Field(0.1, ge=0)
        """Sleep per batch, in seconds."""
        batch_size: int = Field(8, ge=1)
        """Number of items per batch."""
        num_tokens: int = Field(1030, ge=1)
        """Number of vectors per item."""
        dim: int = Field(128, ge=1)
        """Width of the vectors, which are float16."""

    default_inputs = ("item_id",)
    pooled_dim = None
    normalised = True
    has_spans = False
    has_extents = False

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dim = spec.dim
        self.fingerprint = config.digest(
            {"name": spec.name, "num_tokens": spec.num_tokens, "dim": spec.dim}
        )
        generator = torch.Generator().manual_seed(0)
        matrix_ND = normalise(torch.randn(spec.num_tokens, spec.dim, generator=generator)).half()
        # Tiled twice along both axes, so that a rolled matrix is a slice.
        self._tiled = matrix_ND.repeat(2, 2)

    @classmethod
    def check(cls, spec: Spec) -> None:
        """Accepts all specs, because no model is loaded."""

    def encode(
        self, items: pa.Table, taps: Sequence[Tap] = ()
    ) -> Iterator[tuple[np.ndarray, TokenBatch]]:
        """Yields `batch_size` items at a time, in order."""
        item_ids = items["item_id"].to_pylist()
        for start in range(0, len(item_ids), self.spec.batch_size):
            batch_ids = item_ids[start : start + self.spec.batch_size]
            time.sleep(self.spec.seconds)
            vectors_BND = torch.stack([self._rolled(item_id) for item_id in batch_ids])
            mask_BN = torch.ones(vectors_BND.shape[:2], dtype=torch.bool)
            rows = np.arange(start, start + len(batch_ids))
            yield rows, TokenBatch(vectors_BND, mask_BN, normalised=True)

    def encode_queries(self, texts: Sequence[str]) -> EncodedQueries:
        """Returns one vector per word, without sleeping.

        Raises:
            SpecError: `texts` is empty, or a query is empty.
        """
        if not texts:
            raise SpecError("query", [], "at least one text")
        words = [text.split() for text in texts]
        if not all(words):
            raise SpecError("query", texts[words.index([])], "a text with at least one word")
        flat_TD = torch.stack([self._rolled(word)[0] for query in words for word in query])
        vectors_BQD, mask_BQ = pad(flat_TD, np.array([len(query) for query in words]))
        return EncodedQueries(TokenBatch(vectors_BQD, mask_BQ, normalised=True), words)

    def _rolled(self, name: str) -> torch.Tensor:
        """Returns a view of the matrix (N, D), rolled along both axes by a hash of `name`."""
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
        row, column = number % self.spec.num_tokens, number // self.spec.num_tokens % self.dim
        return self._tiled[row : row + self.spec.num_tokens, column : column + self.dim]
