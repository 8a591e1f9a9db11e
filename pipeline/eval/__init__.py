"""Evaluation of indexes with benchmarks, metrics, significance tests and diagnostics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic

import numpy as np

from pipeline.config import ComponentSpec, ComponentSpecT


@dataclass(frozen=True)
class JudgedQueries:
    """Queries of a benchmark with their relevance judgments.

    Attributes:
        queries: Text by query id, in the order of the benchmark. Each query has a judgment. The
            texts are empty if the benchmark contains only vectors.
        qrels: Grades by document id, by query id. Grade 0 means judged not relevant. Documents are
            items or parents, as the spec says.
        num_unjudged: Number of queries left out because they have no judgment.
        num_without_text: Number of judged query ids left out because they have no text or vectors.
        categories: Query ids of each category, by field of the queries, such as `language`.
        vectors: Token vectors (M_i, D) by query id, or None to encode the texts.
    """

    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    num_unjudged: int
    num_without_text: int
    categories: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] | None = None

    @property
    def has_texts(self) -> bool:
        """True if the queries have texts."""
        return any(self.queries.values())


class Benchmark(ABC, Generic[ComponentSpecT]):
    """Base class of benchmarks. Subclasses have a nested `Spec` whose `name` is a literal."""

    Spec: ClassVar[type[ComponentSpec]]

    def __init__(self, spec: ComponentSpecT):
        self.spec = spec

    @abstractmethod
    def load(self) -> JudgedQueries:
        """Loads the queries and judgments.

        Raises:
            SpecError: A file is missing or malformed.
        """
