"""Candidate generators, which find the items that are scored exactly.

A generator describes each item by a small code that is stored as a column of the index. For a
query, it scores the codes of all items and returns the best items as candidates. Only these are
scored with the vectors of the representation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipeline.compression.codecs import Codec
from pipeline.config import ComponentSpec, ComponentSpecT


class Sample(NamedTuple):
    """Sample of an index to which a generator is fitted.

    Attributes:
        queries_SD: (S, D) float32, token vectors that resemble those of queries.
        vectors_TD: (T, D) float32, vectors of a sample of B items, one item after another.
        lengths_B: (B,) int64, number of vectors per item, at least 1.
        num_items: Number of items of the index.
    """

    queries_SD: torch.Tensor
    vectors_TD: torch.Tensor
    lengths_B: torch.Tensor
    num_items: int = 0


class Generator(ABC, Generic[ComponentSpecT]):
    """Base class of candidate generators.

    The approximate score of an item is the MaxSim score of the transformed query (`queries`) over
    the vectors of its code (`encode`), which `codec` quantises.

    Subclasses define a nested `Spec` whose first field is `name: Literal["..."]`. The code of an
    item depends only on its vectors and the artefact, so that items can be added without fitting
    the generator again.
    """

    Spec: ClassVar[type[ComponentSpec]]
    spec: ComponentSpecT
    #: Attribute of `RepresentationInfo` with the column that the codes describe.
    source: ClassVar[str] = "column"
    #: Minimum share of the items in the sample for the fit, and maximum number of their vectors:
    #: 512 MiB of float32 at 128 dimensions.
    sample_share: ClassVar[float] = 0
    max_sample_vectors: ClassVar[int] = 1 << 20
    #: Number of rows whose codes are computed together.
    batch_rows: ClassVar[int] = 1024

    def __init__(self, spec: ComponentSpecT, artefact: dict[str, np.ndarray]):
        self.spec, self.artefact = spec, artefact

    @classmethod
    @abstractmethod
    def fit(cls, spec: ComponentSpecT, sample: Sample) -> dict[str, np.ndarray]:
        """Fits the generator to a sample of the index. The result is deterministic."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """Codec of the vectors of a code."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Dimension of the vectors of a code."""

    @abstractmethod
    def encode(
        self, vectors_TD: torch.Tensor, lengths_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the codes of items.

        Args:
            vectors_TD: (T, D) float32, vectors of B items, one item after another.

        Returns:
            Vectors (V, `dim`) float32 of the codes, one item after another, and their numbers (B,)
            int64, which are 0 for items without vectors.
        """

    @property
    def column_type(self) -> pa.DataType:
        """Arrow type of the column of codes."""
        return self.codec.column_type(self.dim)

    def codes(
        self,
        column: pa.ChunkedArray,
        decode: Callable[[pa.ChunkedArray], tuple[np.ndarray, np.ndarray]],
    ) -> pa.Array:
        """Computes the codes of the items of the column `source` as an array of `column_type`."""
        vectors_TD, lengths_B = decode(column)
        with torch.no_grad():
            codes_VF, counts_B = self.encode(
                torch.from_numpy(vectors_TD).float(), torch.from_numpy(lengths_B)
            )
            return self.codec.encode_rows(codes_VF, counts_B.numpy())

    def remarks(self, codes: pa.ChunkedArray) -> list[str]:
        """Returns sentences about the codes of a sample of items, for the user."""
        return []

    def queries(self, queries: list[torch.Tensor]) -> list[torch.Tensor]:
        """Transforms the token vectors (M_i, D) of queries for comparison with the codes."""
        return queries
