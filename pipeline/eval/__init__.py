"""Evaluations: benchmarks, measures, significance, diagnostics and grounding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic

from pipeline.config import ComponentSpec, ComponentSpecT


@dataclass(frozen=True)
class JudgedQueries:
    """Queries of a benchmark and what was judged about them.

    Attributes:
        queries: text by query id, in the benchmark's order; each has at least one judgment.
        qrels: for each of these the judged documents and their grades; grade 0 is kept, as judged
            not relevant. Documents are the items' parents, or the items: the spec says which.
        num_unjudged: queries left out because they have no judgment.
        num_orphans: queries left out because they have judgments but no text.
        categories: by field of the queries, such as `language`, the ids of the queries of each
            category.
    """

    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    num_unjudged: int
    num_orphans: int
    categories: dict[str, dict[str, list[str]]] = field(default_factory=dict)


class Benchmark(ABC, Generic[ComponentSpecT]):
    """A source of judged queries. Subclasses carry a nested `Spec` with a literal `name`."""

    Spec: ClassVar[type[ComponentSpec]]

    def __init__(self, spec: ComponentSpecT):
        self.spec = spec

    @abstractmethod
    def load(self) -> JudgedQueries:
        """Reads everything; raises `SpecError` if files are missing or not of the right form."""
