"""What training data of all forms on disk become: documents, and rows of a query with one each."""

from __future__ import annotations

import hashlib
import logging
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline import distributed
from pipeline.config import SpecError
from pipeline.sources.files import open_root
from pipeline.training_data.base import NOTHING
from pipeline.training_data.tables import LINES, Cell, files_of, read_rows

logger = logging.getLogger(__name__)

NO_BOXES = np.zeros((0, 4), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Document:
    """What a query is to find: a text, a picture or a video, sound, or several of them.

    Attributes:
        picture: the URI of a file, or a cell of a table.
        location: which line or row names it first.
        boxes: (M, 4) boxes of what is in the picture, whatever is said of it.
        video, sound: URIs of files; a video with a file of its sound is heard by that.
    """

    id: str
    text: str | None
    picture: str | Cell | None
    location: str
    boxes: np.ndarray = field(default_factory=lambda: NO_BOXES)
    video: str | None = None
    sound: str | None = None

    @property
    def places(self) -> dict[str, str | Cell]:
        """What it has beside its text, and where."""
        every = {"picture": self.picture, "video": self.video, "sound": self.sound}
        return {kind: place for kind, place in every.items() if place is not None}

    @property
    def key(self) -> str:
        """A name of what it is, whichever data it is part of."""
        text = "" if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()
        place = self.picture
        if isinstance(place, Cell):
            place = f"{place.table}#{place.group}/{place.row}"
        others = (item for item in self.places.items() if item[0] != "picture")
        media = "".join(f" {kind} {uri}" for kind, uri in others)
        return f"document: {place or ''} {text}{media}"

    @property
    def fact(self) -> int:
        """Its number among the facts of a batch."""
        return hash_of(self.id)


@dataclass(frozen=True, slots=True)
class Row:
    """A query with a document that is relevant to it.

    Attributes:
        document: its number.
        negatives: the numbers of documents that are not, though they look like it.
        scores: a teacher's, of the document and of the negatives.
        boxes: (M, 4) boxes of what the query speaks of.
        phrases: of the query, with the boxes of each.
    """

    query: str
    document: int
    negatives: tuple[int, ...] = ()
    scores: tuple[float, ...] | None = None
    boxes: np.ndarray = field(default_factory=lambda: NO_BOXES)
    phrases: tuple[tuple[str, np.ndarray], ...] = ()


@dataclass
class Listing:
    """Rows and documents, of which a row names its own by number.

    All documents of rows with the same query are relevant to it.
    """

    documents: list[Document] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, document: Document) -> int:
        """The number of a document, one with all others of its id.

        Raises:
            SpecError: for `path`: they are not the same.
        """
        number = self.numbers.get(document.id)
        if number is None:
            number = self.numbers[document.id] = len(self.documents)
            self.documents.append(document)
            return number
        there = self.documents[number]
        # Tables repeat the bytes of a picture in every row: those need not be compared.
        are_cells = isinstance(there.picture, Cell) and isinstance(document.picture, Cell)
        other = replace(document, picture=there.picture) if are_cells else document
        if (there.text, there.places) != (other.text, other.places):
            note = f" ({there.location} and {document.location})"
            raise SpecError("path", document.id, "unique ids", "has two documents", note)
        return number

    def positives(self) -> dict[str, list[int]]:
        """By query, the numbers of its documents."""
        found: dict[str, dict[int, None]] = {}
        for row in self.rows:
            found.setdefault(row.query, {})[row.document] = None
        return {query: list(documents) for query, documents in found.items()}

    def with_rows(self, rows: list[Row]) -> Listing:
        """The same documents with other rows."""
        return Listing(self.documents, rows, self.numbers)


def hash_of(text: str) -> int:
    """A whole number of 64 bits for a text, the same in every run; never `NOTHING`."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little", signed=True)
    return 0 if number == NOTHING else number


def with_some_negatives(row: Row, places: Sequence[int]) -> Row:
    """A row with some of its negatives, and their scores.

    >>> row = Row("q", 0, (5, 6, 7), (0.9, 0.5, 0.6, 0.7))
    >>> some = with_some_negatives(row, [0, 2])
    >>> some.negatives, some.scores
    ((5, 7), (0.9, 0.5, 0.7))
    """
    scores = row.scores and (row.scores[0], *(row.scores[1 + place] for place in places))
    return replace(row, negatives=tuple(row.negatives[place] for place in places), scores=scores)


def without_positives(listing: Listing) -> Listing:
    """The same with no document among the negatives of a query that is relevant to it."""
    positives = {query: set(own) for query, own in listing.positives().items()}
    rows = []
    for row in listing.rows:
        own = positives[row.query]
        kept = [place for place, number in enumerate(row.negatives) if number not in own]
        rows.append(row if len(kept) == len(row.negatives) else with_some_negatives(row, kept))
    return listing.with_rows(rows)


def with_negatives(listing: Listing, uri: str) -> Listing:
    """The same with the hard negatives of a file behind those that rows have.

    Raises:
        SpecError: for `hard_negatives`: a line is invalid or names an unknown document;
            or no query of the file is.
    """
    line_rule = 'a line {"query": "...", "negatives": ["id", ...]}'
    of_query: dict[str, list[int]] = {}
    for file in files_of(uri, LINES, "hard_negatives"):
        try:
            for line in read_rows(file, ("query", "negatives")):
                query, ids = line.fields.get("query"), line.fields.get("negatives")
                if not isinstance(query, str) or not isinstance(ids, list):
                    raise SpecError("path", line.fields, line_rule, note=f" ({line.location})")
                for own in ids:
                    if str(own) not in listing.numbers:
                        rule = "the id of a document in the data"
                        raise SpecError("path", own, rule, note=f" ({line.location})")
                of_query.setdefault(query, []).extend(listing.numbers[str(own)] for own in ids)
        except SpecError as error:
            raise error.at("hard_negatives") from None
    if not any(row.query in of_query for row in listing.rows):
        known = "a file with queries of the data"
        raise SpecError("hard_negatives", uri, known, "has none")
    rows = []
    for row in listing.rows:
        more = [n for n in dict.fromkeys(of_query.get(row.query, ())) if n not in row.negatives]
        scores = row.scores and (*row.scores, *[float("nan")] * len(more))
        rows.append(replace(row, negatives=(*row.negatives, *more), scores=scores))
    return listing.with_rows(rows)


def with_files(listing: Listing) -> Listing:
    """The same without the rows, and the negatives, of which a file is not there.

    Raises:
        SpecError: for `path`: that leaves no row.
    """
    used = {row.document for row in listing.rows}
    used |= {number for row in listing.rows for number in row.negatives}
    missing = _missing(listing, sorted(used))
    if not missing:
        return listing
    rows = []
    for row in listing.rows:
        if row.document not in missing:
            kept = [place for place, number in enumerate(row.negatives) if number not in missing]
            rows.append(with_some_negatives(row, kept))
    number, (kind, uri) = next(iter(missing.items()))
    location = listing.documents[number].location
    if not rows:
        rule = f"data with existing {kind} files"
        raise SpecError("path", uri, rule, "has none", f" ({location})")
    if distributed.rank() == 0:
        logger.warning(
            "%d of %d rows and %d of %d documents are left out: there is no %s %s (%s)",
            len(listing.rows) - len(rows),
            len(listing.rows),
            len(missing),
            len(used),
            kind,
            uri,
            location,
        )
    return listing.with_rows(rows)


def _missing(listing: Listing, numbers: Sequence[int]) -> dict[int, tuple[str, str]]:
    """The documents of which a file is not there, with the first that is not.

    A folder is listed once, wherever it lies.
    """
    there: dict[str, set[str]] = {}
    missing: dict[int, tuple[str, str]] = {}
    for number in numbers:
        for kind, uri in listing.documents[number].places.items():
            if not isinstance(uri, str):
                continue
            folder, name = posixpath.split(uri)
            if folder not in there:
                fs, path = open_root(folder)
                try:
                    there[folder] = {posixpath.basename(own) for own in fs.ls(path, detail=False)}
                except OSError:
                    there[folder] = set()
            if name not in there[folder]:
                missing.setdefault(number, (kind, uri))
    return missing


def groups_of(listing: Listing) -> np.ndarray:
    """(R,) int64: for each row the row group that holds its picture, numbered from 0; -1: none."""
    numbers: dict[tuple[str, int], int] = {}
    groups = []
    for row in listing.rows:
        cell = listing.documents[row.document].picture
        if isinstance(cell, Cell):
            groups.append(numbers.setdefault((cell.table, cell.group), len(numbers)))
        else:
            groups.append(-1)
    return np.array(groups, dtype=np.int64)
