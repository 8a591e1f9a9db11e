"""Vectors that a search needs. Calls are routed to replicas that have loaded them."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.search.options import SearchOptions
from pipeline.search.scores import Score


class SearchVectors(NamedTuple):
    """Vectors that a search needs, as the arguments of `Searcher.load`."""

    representation: str
    score: Score
    candidates: str

    @classmethod
    def of(cls, options: SearchOptions) -> SearchVectors:
        """Returns the vectors that the first stage of a search needs."""
        return cls(options.column, options.score, options.candidates)
