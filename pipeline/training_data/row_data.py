"""Training data of rows: how batches are made of them, whatever form they have on disk."""

from __future__ import annotations

import functools
import logging
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import fsspec
import numpy as np
import torch
from pydantic import Field, field_validator

from pipeline import config
from pipeline.config import JobError, SpecError, Uri
from pipeline.decoding import Unreadable
from pipeline.decoding.image import decode
from pipeline.encoders.batching import prefetch
from pipeline.training_data.base import NOTHING, Batch, Phrases, TrainingData, own_share
from pipeline.training_data.media import Decoding, decoded, settings_of
from pipeline.training_data.rows import (
    NO_BOXES,
    Document,
    Listing,
    Row,
    groups_of,
    hash_of,
    with_files,
    with_negatives,
    with_some_negatives,
    without_positives,
)
from pipeline.training_data.tables import Cell, Cells

logger = logging.getLogger(__name__)

#: The key of a document that only fills up a batch, and of one that cannot be read.
NO_DOCUMENT = "nothing"
#: A picture that claims more is not decoded.
MAX_INPUT_PIXELS = 200_000_000
#: Files that are decoded at the same time.
DECODERS = 4
#: Documents of video or sound that are read at once where no batch needs more in memory.
MEDIA_AT_ONCE = 64


class ValidationFiles(config.Spec):
    """Validation data in files of the same form.

    Attributes:
        path: Path of the files.
    """

    path: Uri


class RowSpec(config.ComponentSpec):
    """Base of the specs of training data in rows.

    Attributes:
        path: the files.
        hard_negatives: JSON lines {"query": ..., "negatives": [ids of documents]}, as
            `python -m jobs.mine` writes them.
        num_negatives: at most so many of a query's hard negatives are in its batch, others in each
            epoch; null: all.
        validation: Validation data, which are one batch in memory: a fraction of the documents
            with their queries, or {path: ...}; null for none.
        mixed_groups: where tables hold the pictures, rows are shuffled among so many row groups
            at a time, which stay in memory.
        max_pixels: a larger picture is made smaller.
        media: what is decoded of videos and sound, and how.
    """

    renamed: ClassVar[Mapping[str, str]] = {"held_out": "validation"}

    path: Uri
    hard_negatives: Uri | None = None
    num_negatives: int | None = Field(None, ge=0)
    validation: float | ValidationFiles | None = None
    mixed_groups: int = Field(16, ge=1)
    max_pixels: int = Field(4_000_000, ge=10_000, le=100_000_000)
    media: Decoding = Decoding()

    @field_validator("validation", mode="before")
    @classmethod
    def _refuse_no_share(cls, value: Any) -> Any:
        is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1
        if not (is_share or value is None or isinstance(value, Mapping | ValidationFiles)):
            raise SpecError("", value, "a fraction between 0 and 1, {path: ...} or null")
        return value


RowSpecT = TypeVar("RowSpecT", bound=RowSpec)


class RowData(TrainingData[RowSpecT]):
    """Batches of rows, with the hard negatives of their queries.

    **Batches.** A batch is `batch_size` rows, in an order of the epoch; rows that fill none are
    left out. Its documents are those of its rows, once each, and then the hard negatives. A
    document is with the first worker that has a row of it, so that all workers together have what
    one would have; who has fewer documents than another is filled up with some that have no tokens
    and are relevant to nothing: no candidates in the loss.

    **Pictures, videos, sound.** They are read when their batch is. What is not there when the rows
    are listed is left out with its rows. What cannot be read later becomes a document without
    tokens, so that batches stay what they are for all workers: its queries have no positive, and no
    loss.
    """

    def __init__(self, spec: RowSpecT, *, batch_size: int, seed: int):
        super().__init__(spec, batch_size=batch_size, seed=seed)
        self._cells = Cells(spec.mixed_groups)
        self._num_unreadable = 0
        self._lock = threading.Lock()
        with config.within("data"):
            listing = self.listing()
            if spec.hard_negatives is not None:
                listing = with_negatives(listing, spec.hard_negatives)
            self.rows, self._validation = self._split(with_files(without_positives(listing)))
            if "audio" not in spec.media.wants and any(
                document.sound is not None and document.video is None
                for document in self._documents
            ):
                problem = "leaves nothing of audio documents"
                raise SpecError("media.wants", list(spec.media.wants), "a list with audio", problem)
            if len(self.rows.rows) < batch_size:
                problem = f"has {len(self.rows.rows)} training rows"
                raise SpecError(
                    "path", spec.path, f"data of at least one batch ({batch_size} rows)", problem
                )
        self._positives = self.rows.positives()
        self._group_R = groups_of(self.rows)
        # Kept: each of its threads has processes of its own that decode videos.
        self._pool = ThreadPoolExecutor(DECODERS)

    @abstractmethod
    def listing(self) -> Listing:
        """All rows of `path`.

        Raises:
            SpecError: A file, or a line or row of it, is invalid.
        """

    @abstractmethod
    def validation_listing(self) -> Listing:
        """Returns the rows of `validation.path`."""

    # -- which rows --------------------------------------------------------------------------------

    def _split(self, listing: Listing) -> tuple[Listing, Listing | None]:
        """Splits the rows into training and validation data.

        A fraction selects documents by hashes of their ids, independently of the seed.
        """
        share = self.spec.validation
        if share is None:
            return listing, None
        if not isinstance(share, float):
            with config.within("validation"):
                return listing, with_files(self.validation_listing())
        own = {row.document for row in listing.rows}
        order = sorted(own, key=lambda number: hash_of(f"held out: {listing.documents[number].id}"))
        held = set(order[: max(1, round(share * len(own)))])
        rows = []
        for row in listing.rows:
            if row.document not in held:
                kept = [place for place, number in enumerate(row.negatives) if number not in held]
                rows.append(with_some_negatives(row, kept))
        trained = {row.query for row in rows}
        asked = [r for r in listing.rows if r.document in held and r.query not in trained]
        if not asked:
            rule = "another fraction or {path: ...}"
            raise SpecError("validation", share, rule, "holds out no query")
        return listing.with_rows(rows), listing.with_rows(asked)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch; rows that fill none are left out."""
        return len(self.rows.rows) // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """(R,) the rows in the order of an epoch."""
        random = np.random.default_rng([self.seed, epoch])
        num_rows = len(self._group_R)
        window_R = np.zeros(num_rows, dtype=np.int64)
        if (self._group_R >= 0).any():
            num_groups = int(self._group_R.max()) + 1
            # Rows whose pictures lie in files of their own go anywhere.
            anywhere_R = random.integers(num_groups, size=num_rows)
            group_R = np.where(self._group_R < 0, anywhere_R, self._group_R)
            window_R = random.permutation(num_groups)[group_R] // self.spec.mixed_groups
        return np.lexsort((random.random(num_rows), window_R))

    def _drawn(self, number: int, epoch: int) -> Row:
        """A row with the negatives that it has in an epoch."""
        row, most = self.rows.rows[number], self.spec.num_negatives
        if most is None or len(row.negatives) <= most:
            return row
        random = np.random.default_rng([self.seed, epoch, number])
        places = np.sort(random.choice(len(row.negatives), most, replace=False))
        return with_some_negatives(row, places.tolist())

    # -- batches -----------------------------------------------------------------------------------

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """One worker's share; the next batch is read while one is in use."""
        order_R = self.order(epoch)

        def read(number: int) -> Batch:
            start = number * self.batch_size
            numbers = order_R[start : start + self.batch_size].tolist()
            rows = [self._drawn(own, epoch) for own in numbers]
            return self._batch(rows, worker, num_workers)

        for _, batch in prefetch(range(first, self.num_batches), read):
            yield batch

    def everything(self, worker: int, num_workers: int) -> Iterator[Batch]:
        """All queries, documents and hard negatives, also those that fill no batch."""
        rows = self.rows.rows
        used = {number: None for row in rows for number in (row.document, *row.negatives)}
        numbers = [NOTHING, *used][worker::num_workers]
        queries = list(self._positives)[worker::num_workers]
        size = min(self.batch_size, MEDIA_AT_ONCE) if self._has_media else self.batch_size
        for start in range(0, max(len(numbers), len(queries)), size):
            own = slice(start, start + size)
            yield self._read(self.rows, [(query, ()) for query in queries[own]], numbers[own])

    def _batch(self, rows: Sequence[Row], worker: int, num_workers: int) -> Batch:
        """One worker's share of the rows of a batch."""
        shares = [rows[own_share(len(rows), w, num_workers)] for w in range(num_workers)]
        owner: dict[int, int] = {}
        for other, share in enumerate(shares):
            for row in share:
                owner.setdefault(row.document, other)
        for other, share in enumerate(shares):
            for row in share:
                for number in row.negatives:
                    owner.setdefault(number, other)
        counts = np.bincount(list(owner.values()), minlength=num_workers)
        numbers = [number for number, other in owner.items() if other == worker]
        numbers += [NOTHING] * int(counts.max() - len(numbers))

        relevant = [
            [number for number in self._positives[row.query] if number in owner] for row in rows
        ]
        own = own_share(len(rows), worker, num_workers)
        return self._read(
            self.rows,
            list(zip([row.query for row in rows[own]], relevant[own], strict=True)),
            numbers,
            num_facts=max(map(len, relevant)),
            boxes=self._boxes(rows, numbers) if self._has_boxes else None,
            teacher=teacher_of(rows[own], numbers) if self.has_teacher else None,
        )

    def validation(self) -> Batch | None:
        """Returns the validation queries with their documents and phrases."""
        if self._validation is None:
            return None
        positives = self._validation.positives()
        numbers = list(dict.fromkeys(number for own in positives.values() for number in own))
        batch = self._read(self._validation, list(positives.items()), numbers)
        place = {number: row for row, number in enumerate(numbers)}
        said = [
            (text, place[row.document], boxes)
            for row in self._validation.rows
            for text, boxes in row.phrases
            if batch.document_keys[place[row.document]] != NO_DOCUMENT
        ]
        return replace(batch, phrases=Phrases(*zip(*said, strict=True))) if said else batch

    def _read(
        self,
        listing: Listing,
        queries: Sequence[tuple[str, Sequence[int]]],
        numbers: Sequence[int],
        *,
        num_facts: int | None = None,
        boxes: list[np.ndarray] | None = None,
        teacher: torch.Tensor | None = None,
    ) -> Batch:
        """Queries with their relevant documents, and documents, `NOTHING` for one without tokens.

        Raises:
            JobError: of several files none can be read.
        """
        wanted = [None if n == NOTHING else listing.documents[n] for n in numbers]
        items = list(self._pool.map(self._item, wanted))
        documents = [
            document if item is not None else None
            for document, item in zip(wanted, items, strict=True)
        ]
        files = [row for row, document in enumerate(wanted) if document and document.places]
        if len(files) > 1 and all(documents[row] is None for row in files):
            first = listing.documents[numbers[files[0]]]
            kind = next(iter(first.places))
            raise JobError(f"none of {len(files)} {kind}s of a batch can be read: {first.location}")

        if num_facts is None:
            num_facts = max((len(own) for _, own in queries), default=1)
        query_facts = torch.full((len(queries), max(1, num_facts)), NOTHING)
        for row, (_, own) in enumerate(queries):
            facts = [listing.documents[number].fact for number in own]
            query_facts[row, : len(facts)] = torch.tensor(facts, dtype=torch.int64)
        document_facts = torch.full((len(numbers), 1), NOTHING)
        for row, document in enumerate(documents):
            if document is not None:
                document_facts[row] = document.fact
        if boxes is not None:
            boxes = [own if d else NO_BOXES for own, d in zip(boxes, documents, strict=True)]
        if teacher is not None:
            teacher[:, torch.tensor([document is None for document in documents])] = torch.nan
        return Batch(
            [query for query, _ in queries],
            [self._nothing | (item or {}) for item in items],
            [self._key(document) if document else NO_DOCUMENT for document in documents],
            query_facts,
            document_facts,
            boxes=boxes,
            teacher=teacher,
        )

    # -- what a batch has of a document ------------------------------------------------------------

    def _item(self, document: Document | None) -> dict[str, Any] | None:
        """A document as encoders read it; None: nothing, or a file of it cannot be read."""
        if document is None:
            return None
        if self._key(document) in self.known:
            return self._nothing
        if self.knows_all:
            return None
        item: dict[str, Any] = {"text": document.text}
        try:
            if document.picture is not None:
                item["image"] = self._picture(document.picture)
            if _is_media(document):
                item |= decoded(self.spec.media, document.video, document.sound)
        except (Unreadable, OSError) as error:
            self._say_unreadable(document, error)
            return None
        return item

    def _picture(self, place: str | Cell) -> bytes:
        if isinstance(place, str):
            with fsspec.open(place, "rb") as file:
                data = file.read()
        else:
            data = self._cells.read(place)
        return decode(data, self.spec.max_pixels, MAX_INPUT_PIXELS)["image"]

    def _key(self, document: Document) -> str:
        """The document's key; of what is decoded by settings, with those."""
        return f"{document.key} {self._settings}" if _is_media(document) else document.key

    @functools.cached_property
    def _settings(self) -> str:
        return config.digest(settings_of(self.spec.media))

    @functools.cached_property
    def _has_media(self) -> bool:
        return any(map(_is_media, self._documents))

    @functools.cached_property
    def _nothing(self) -> dict[str, None]:
        """All that documents of the data may have: a table is made by the first one's columns."""
        names = ["text"]
        if any(document.picture is not None for document in self._documents):
            names.append("image")
        if self._has_media:
            names += [*self.spec.media.wants, "span"]
        return dict.fromkeys(names)

    @property
    def _documents(self) -> list[Document]:
        validation = self._validation.documents if self._validation else []
        return [*self.rows.documents, *validation]

    def _say_unreadable(self, document: Document, error: Exception) -> None:
        """Says the first, the tenth, the hundredth ...: there may be one in every batch."""
        with self._lock:
            self._num_unreadable += 1
            count = self._num_unreadable
        if str(count).strip("0") == "1":
            logger.warning(
                "the %s of %s (%s) cannot be read: %s; its queries have no positive (%d so)",
                next(iter(document.places)),
                document.id,
                document.location,
                error,
                count,
            )

    @functools.cached_property
    def gives(self) -> frozenset[str]:
        """Texts, pictures, and what is decoded of videos and sound; whatever any document is."""
        kinds = {"text"} if any(document.text for document in self._documents) else set()
        if any(document.picture is not None for document in self._documents):
            kinds.add("image")
        return frozenset(kinds | (set(self.spec.media.wants) if self._has_media else set()))

    @functools.cached_property
    def has_teacher(self) -> bool:
        """Whether rows have scores."""
        return any(row.scores is not None for row in self.rows.rows)

    @functools.cached_property
    def _has_boxes(self) -> bool:
        listing = self.rows
        return any(len(row.boxes) for row in listing.rows) or any(
            len(document.boxes) for document in listing.documents
        )

    @functools.cached_property
    def _rows_of(self) -> dict[int, list[Row]]:
        """By document, its rows."""
        rows_of: dict[int, list[Row]] = {}
        for row in self.rows.rows:
            rows_of.setdefault(row.document, []).append(row)
        return rows_of

    def _boxes(self, rows: Sequence[Row], numbers: Sequence[int]) -> list[np.ndarray]:
        """Of each document the boxes of what a batch's queries say of it, or all of a negative's.

        A box that two captions speak of is one object.
        """
        said: dict[int, list[Row]] = {}
        for row in rows:
            said.setdefault(row.document, []).append(row)
        found = []
        for number in numbers:
            if number == NOTHING:
                found.append(NO_BOXES)
                continue
            own = said.get(number) or self._rows_of.get(number, [])
            every = [self.rows.documents[number].boxes, *(row.boxes for row in own)]
            found.append(np.unique(np.concatenate(every), axis=0))
        return found


def _is_media(document: Document) -> bool:
    return document.video is not None or document.sound is not None


def teacher_of(rows: Sequence[Row], numbers: Sequence[int]) -> torch.Tensor:
    """(Q, B) the scores that a teacher gave the documents of a batch; NaN where it gave none.

    >>> teacher_of([Row("q", 3, (5,), (0.75, 0.25))], [5, 4, 3])
    tensor([[0.2500,    nan, 0.7500]])
    """
    place = {number: column for column, number in enumerate(numbers)}
    scores_QB = torch.full((len(rows), len(numbers)), torch.nan)
    for query, row in enumerate(rows):
        for number, score in zip((row.document, *row.negatives), row.scores or (), strict=False):
            if number in place:
                scores_QB[query, place[number]] = score
    return scores_QB
