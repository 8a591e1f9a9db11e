"""Documents and rows of training data. All formats are converted to them."""

from __future__ import annotations

import hashlib
import logging
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.config import SpecError
from pipeline.data.files import open_root
from pipeline.eval.boxes import NO_BOXES
from pipeline.train.data.base import NO_LABEL
from pipeline.train.data.tables import LINES, ArchiveMember, ImageCell, list_files, read_rows

logger = logging.getLogger(__name__)


def warn(message: str, *arguments: object) -> None:
    """Logs a warning, in the first of several workers."""
    from pipeline.runtime import distributed  # imports torch, which a source does not need

    if distributed.rank() == 0:
        logger.warning(message, *arguments)


@dataclass(frozen=True, slots=True)
class Document:
    """Document of training data: a text, an image or video, audio, or several of them.

    Attributes:
        image: URI of an image file, a cell of a table, or a member of an archive.
        video: URI of a video file, or a member of an archive.
        location: Line or row that names the document first.
        boxes: Boxes (M, 4) of the objects in the image, independently of the query.
        audio: URI of an audio file, or a member of an archive, which replaces the audio of the
            video.
    """

    id: str
    text: str | None
    image: str | ImageCell | ArchiveMember | None
    location: str
    boxes: np.ndarray = field(default_factory=lambda: NO_BOXES)
    video: str | ArchiveMember | None = None
    audio: str | ArchiveMember | None = None

    @property
    def media(self) -> dict[str, str | ImageCell | ArchiveMember]:
        """Locations of the image, video and audio, by kind."""
        media = {"image": self.image, "video": self.video, "audio": self.audio}
        return {kind: location for kind, location in media.items() if location is not None}

    @property
    def key(self) -> str:
        """Key of the content, which does not depend on the data that contain the document."""
        text = "" if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()
        image = self.image
        if isinstance(image, ImageCell):
            image = f"{image.table}#{image.group}/{image.row}"
        # The format is fixed: the keys are stored with cached hidden states.
        names = {"video": "video", "audio": "sound"}
        media = "".join(
            f" {names[kind]} {file}" for kind, file in self.media.items() if kind in names
        )
        return f"document: {image or ''} {text}{media}"

    @property
    def label(self) -> int:
        """Relevance label, which copies of a document under other ids share.

        Their media are the same files, and their texts differ at most in white space.
        """
        text = None if self.text is None else " ".join(self.text.split())
        return stable_hash(replace(self, text=text).key)


@dataclass(frozen=True, slots=True)
class Row:
    """Query with a relevant document.

    Attributes:
        document: Number of the relevant document.
        negatives: Numbers of the hard negatives.
        scores: Teacher scores of the document and of the negatives.
        boxes: Boxes (M, 4) of what the query describes.
    """

    query: str
    document: int
    negatives: tuple[int, ...] = ()
    scores: tuple[float, ...] | None = None
    boxes: np.ndarray = field(default_factory=lambda: NO_BOXES)
    phrases: tuple[tuple[str, np.ndarray], ...] = ()


@dataclass
class Listing:
    """Documents, and rows that refer to documents by number.

    All documents in rows with the same query are relevant to it.

    Attributes:
        numbers: Number of each document, by id.
    """

    documents: list[Document] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, document: Document) -> int:
        """Adds a document, unless it is listed, and returns its number."""
        number = self.numbers.get(document.id)
        if number is None:
            number = self.numbers[document.id] = len(self.documents)
            self.documents.append(document)
            return number
        known = self.documents[number]
        # Tables repeat the bytes of an image in every row, so cells are not compared.
        are_cells = isinstance(known.image, ImageCell) and isinstance(document.image, ImageCell)
        other = replace(document, image=known.image) if are_cells else document
        if (known.text, known.media) != (other.text, other.media):
            note = f" ({known.location} and {document.location})"
            raise SpecError("path", document.id, "unique ids", "has two documents", note)
        return number

    def positives(self) -> dict[str, list[int]]:
        """Returns the numbers of the relevant documents of each query."""
        found: dict[str, dict[int, None]] = {}
        for row in self.rows:
            found.setdefault(row.query, {})[row.document] = None
        return {query: list(documents) for query, documents in found.items()}

    def with_rows(self, rows: list[Row]) -> Listing:
        """Returns a listing with the same documents and other rows."""
        return Listing(self.documents, rows, self.numbers)


def stable_hash(text: str) -> int:
    """Returns a signed 64-bit hash of a text, the same in every process and never `NO_LABEL`."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little", signed=True)
    return 0 if number == NO_LABEL else number


def select_negatives(row: Row, indices: Sequence[int]) -> Row:
    """Returns a row that has only some of its negatives and their scores.

    >>> row = Row("q", 0, (5, 6, 7), (0.9, 0.5, 0.6, 0.7))
    >>> selected = select_negatives(row, [0, 2])
    >>> selected.negatives, selected.scores
    ((5, 7), (0.9, 0.5, 0.7))
    """
    scores = row.scores and (row.scores[0], *(row.scores[1 + i] for i in indices))
    return replace(row, negatives=tuple(row.negatives[i] for i in indices), scores=scores)


def is_negative(value: Any) -> bool:
    """Checks whether a value is a hard negative: an id, a text or a path that is not blank."""
    return isinstance(value, str | int) and not isinstance(value, bool) and bool(str(value).strip())


def drop_relevant_negatives(listing: Listing) -> Listing:
    """Removes the negatives that are relevant to the query, or copies of relevant documents."""
    if not any(row.negatives for row in listing.rows):
        return listing
    labels = [document.label for document in listing.documents]
    positives = {query: {labels[n] for n in ns} for query, ns in listing.positives().items()}
    rows, num_dropped = [], 0
    for row in listing.rows:
        relevant = positives[row.query]
        indices = [i for i, number in enumerate(row.negatives) if labels[number] not in relevant]
        rows.append(row if len(indices) == len(row.negatives) else select_negatives(row, indices))
        num_dropped += len(row.negatives) - len(indices)
    if num_dropped:
        reason = "they are relevant documents of their query, or copies of one"
        warn("%d hard negatives are left out: %s", num_dropped, reason)
    return listing.with_rows(rows)


def add_hard_negatives(listing: Listing, uri: str) -> Listing:
    """Appends the hard negatives from a file to those of the rows."""
    line_rule = 'a line {"query": "...", "negatives": ["id", ...]}'
    negatives: dict[str, list[int]] = {}
    for file in list_files(uri, LINES, "hard_negatives"):
        try:
            for line in read_rows(file, ("query", "negatives")):
                query, ids = line.fields.get("query"), line.fields.get("negatives")
                if (
                    not isinstance(query, str)
                    or not isinstance(ids, list)
                    or not all(map(is_negative, ids))
                ):
                    raise SpecError("path", line.fields, line_rule, note=f" ({line.location})")
                for document_id in ids:
                    if str(document_id) not in listing.numbers:
                        rule = "the id of a document in the data"
                        raise SpecError("path", document_id, rule, note=f" ({line.location})")
                numbers = [listing.numbers[str(document_id)] for document_id in ids]
                negatives.setdefault(query, []).extend(numbers)
        except SpecError as error:
            raise error.at("hard_negatives") from None
    if not any(row.query in negatives for row in listing.rows):
        rule = "a file with queries of the data"
        raise SpecError("hard_negatives", uri, rule, "contains no query of the data")
    rows = []
    for row in listing.rows:
        added = [n for n in dict.fromkeys(negatives.get(row.query, ())) if n not in row.negatives]
        scores = row.scores and (*row.scores, *[float("nan")] * len(added))
        rows.append(replace(row, negatives=(*row.negatives, *added), scores=scores))
    return listing.with_rows(rows)


def drop_missing_files(listing: Listing) -> Listing:
    """Removes rows and negatives whose files are missing, and logs a warning."""
    used = {row.document for row in listing.rows}
    used |= {number for row in listing.rows for number in row.negatives}
    missing = _missing(listing, sorted(used))
    if not missing:
        return listing
    rows = []
    for row in listing.rows:
        if row.document not in missing:
            indices = [i for i, number in enumerate(row.negatives) if number not in missing]
            rows.append(select_negatives(row, indices))
    number, (kind, uri) = next(iter(missing.items()))
    location = listing.documents[number].location
    if not rows:
        rule = f"data with existing {kind} files"
        raise SpecError("path", uri, rule, "does not exist", f" ({location})")
    warn(
        "%d of %d rows and %d of %d documents are left out: missing files, such as %s %s (%s)",
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
    """Returns the first missing file and its kind by document; each folder is listed once."""
    names: dict[str, set[str]] = {}
    missing: dict[int, tuple[str, str]] = {}
    for number in numbers:
        for kind, uri in listing.documents[number].media.items():
            if not isinstance(uri, str):
                continue
            folder, name = posixpath.split(uri)
            if folder not in names:
                fs, path = open_root(folder)
                try:
                    names[folder] = {posixpath.basename(file) for file in fs.ls(path, detail=False)}
                except OSError:
                    names[folder] = set()
            if name not in names[folder]:
                missing.setdefault(number, (kind, uri))
    return missing


def row_groups(listing: Listing) -> np.ndarray:
    """Returns the row group of each row's image (R,) int64, numbered from 0, or -1 without one."""
    numbers: dict[tuple[str, int], int] = {}
    groups = []
    for row in listing.rows:
        cell = listing.documents[row.document].image
        if isinstance(cell, ImageCell):
            groups.append(numbers.setdefault((cell.table, cell.group), len(numbers)))
        else:
            groups.append(-1)
    return np.array(groups, dtype=np.int64)
