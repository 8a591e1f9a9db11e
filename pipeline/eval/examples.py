"""Example queries of a report, with their judged documents and the hits of the compared rows."""

from __future__ import annotations

from typing import Literal

from pipeline.eval.cache import CacheEntry

#: Delimiters of matched words; `snippet` removes control characters from texts.
HIGHLIGHT_DELIMITERS = ("\x02", "\x03")
Reason = Literal["lost", "won", "failed"]


class HitImage(CacheEntry):
    """Image of a hit."""

    caption: str
    png: str


class Document(CacheEntry):
    """Document of an example.

    Attributes:
        snippet: Best passage, with `HIGHLIGHT_DELIMITERS` around matched words.
        grade: Grade of the document, or None if it was not judged for the query.
        ranks: Rank of the document, by compared row, or None if it is not in the run.
    """

    document_id: str
    title: str
    snippet: str
    grade: int | None
    ranks: dict[str, int | None]
    images: list[HitImage]


class Example(CacheEntry):
    """Example query with its judged documents and the hits of the rows that are compared."""

    reason: Reason
    query_id: str
    query: str
    values: dict[str, float]
    judged: list[Document]
    hits: dict[str, list[Document]]


class Examples(CacheEntry):
    """Examples of one evaluation."""

    examples: list[Example]
