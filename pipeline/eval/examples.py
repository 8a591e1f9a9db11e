"""Example queries of a report: their judged documents, and the hits of the compared rows."""

from __future__ import annotations

from typing import Literal

from pipeline.eval.cells import Kept

#: Delimiters of matched words: `snippet` has removed control characters from texts.
MARKS = ("\x02", "\x03")
Why = Literal["lost", "won", "failed"]


class Picture(Kept):
    """An image of a hit: PNG in base64."""

    caption: str
    png: str


class Document(Kept):
    """A document of an example.

    Attributes:
        snippet: The best passage, with matched words between `MARKS`.
        grade: The judged grade; None if the document was not judged for this query.
        ranks: Its rank by compared row; None below the depth of the runs.
    """

    document_id: str
    title: str
    snippet: str
    grade: int | None
    ranks: dict[str, int | None]
    pictures: list[Picture]


class Example(Kept):
    """One query with its judged documents and the hits of the compared rows.

    Attributes:
        values: The headline measure, by row.
        hits: The best hits, by row.
    """

    why: Why
    query_id: str
    query: str
    values: dict[str, float]
    judged: list[Document]
    hits: dict[str, list[Document]]


class Examples(Kept):
    """The examples of one evaluation, as they are cached."""

    examples: list[Example]
