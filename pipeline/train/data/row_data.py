"""Training data that form batches from rows, which may be stored in any format."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import Field, field_validator

from pipeline import config
from pipeline.config import JobError, SpecError, Uri
from pipeline.data.decode import Unreadable
from pipeline.data.decode.image import decode
from pipeline.eval.boxes import NO_BOXES
from pipeline.paths import open_file
from pipeline.train.data.base import NO_LABEL, Batch, Phrases, TrainingData, worker_slice
from pipeline.train.data.media import Decoding, decode_media, decoding_settings
from pipeline.train.data.rows import (
    Document,
    Listing,
    Row,
    add_hard_negatives,
    drop_missing_files,
    drop_relevant_negatives,
    row_groups,
    select_negatives,
    stable_hash,
)
from pipeline.train.data.tables import ArchiveMember, ImageCell, ImageReader

if TYPE_CHECKING:  # imported lazily, because the sources of published collections need no torch
    import torch

logger = logging.getLogger(__name__)

#: Key of padding documents, and of documents that cannot be read.
NO_DOCUMENT = "nothing"
#: Maximum number of pixels in the header of an image. Larger images are not decoded.
MAX_INPUT_PIXELS = 200_000_000
#: Number of files that are decoded concurrently.
NUM_DECODERS = 4
#: Maximum number of documents per batch of `full_pass` for video and audio, to limit memory.
MAX_MEDIA_BATCH = 64


class ValidationFiles(config.Spec):
    """Validation data in files of the same format."""

    path: Uri
    """Path of the files."""


class RowSpec(config.ComponentSpec):
    """Base of the specs of training data in rows."""

    path: Uri
    """Path of the files."""
    hard_negatives: Uri | None = None
    """JSON lines {"query": ..., "negatives": [document ids]}, as written by `maxray train mine`.
    """
    num_negatives: int | None = Field(None, ge=0)
    """Maximum number of hard negatives per query in a batch, sampled in each epoch, or null for
    all.
    """
    validation: float | ValidationFiles | None = None
    """Validation data, held in memory as one batch: a fraction of the documents with their queries,
    or {path: ...}, or null for none."""
    mixed_groups: int = Field(16, ge=1)
    """Number of row groups that rows are shuffled among, and that stay in memory, if tables contain
    the images."""
    max_pixels: int = Field(4_000_000, ge=10_000, le=100_000_000)
    """Maximum number of pixels. Larger images are downscaled."""
    media: Decoding = Decoding()
    """Decoding of videos and audio."""

    @field_validator("validation", mode="before")
    @classmethod
    def _check_validation(cls, value: Any) -> Any:
        is_fraction = (
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1
        )
        if not (is_fraction or value is None or isinstance(value, Mapping | ValidationFiles)):
            raise SpecError("", value, "a fraction between 0 and 1, {path: ...} or null")
        return value


RowSpecT = TypeVar("RowSpecT", bound=RowSpec)


class RowData(TrainingData[RowSpecT]):
    """Batches of rows and the hard negatives of their queries.

    **Batches.** A batch consists of `batch_size` rows in the order of the epoch. The last batch is
    dropped if it is incomplete. The documents of a batch are those of its rows, without duplicates,
    followed by the hard negatives. If several workers have rows of the same document, it belongs to
    the first of them. All workers together therefore have the same documents as a single worker
    would have. Workers with fewer documents are padded with documents that have no tokens, which
    the loss ignores.

    **Images, videos, audio.** Files are read when their batch is needed. If a file is missing when
    the rows are listed, its rows are omitted. If a file cannot be read later, its document has no
    tokens, so that the batches of the other workers do not change. Queries for this document then
    have no positive and no loss.
    """

    def __init__(self, spec: RowSpecT, *, batch_size: int, seed: int):
        super().__init__(spec, batch_size=batch_size, seed=seed)
        self._image_reader = ImageReader(spec.mixed_groups)
        self._num_unreadable = 0
        self._lock = threading.Lock()
        with config.within("data"):
            listing = self.rows(spec)
            if spec.hard_negatives is not None:
                listing = add_hard_negatives(listing, spec.hard_negatives)
            self.training, self._validation = self._split(
                drop_missing_files(drop_relevant_negatives(listing))
            )
            if "audio" not in spec.media.inputs and any(
                document.audio is not None and document.video is None
                for document in self._documents
            ):
                rule = "a list with audio if documents have only audio"
                raise SpecError("media.inputs", list(spec.media.inputs), rule)
            if len(self.training.rows) < batch_size:
                problem = f"has {len(self.training.rows)} training rows"
                raise SpecError(
                    "path", spec.path, f"data of at least one batch ({batch_size} rows)", problem
                )
        self._positives = self.training.positives()
        self._group_R = row_groups(self.training)
        # The pool is reused because each thread starts its own processes to decode videos.
        self._pool = ThreadPoolExecutor(NUM_DECODERS)

    @abstractmethod
    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads the rows of the files of the spec or of its `validation`."""

    # -- selection of rows -------------------------------------------------------------------------

    def _split(self, listing: Listing) -> tuple[Listing, Listing | None]:
        """Splits the rows into training and validation data.

        If a fraction is given, documents are selected by hashes of their ids, together with their
        copies under other ids. The selection does not depend on the seed.
        """
        fraction = self.spec.validation
        if fraction is None:
            return listing, None
        if not isinstance(fraction, float):
            with config.within("validation"):
                return listing, drop_missing_files(self.rows(fraction))
        documents = {row.document for row in listing.rows}
        order = sorted(
            documents, key=lambda number: stable_hash(f"held out: {listing.documents[number].id}")
        )
        labels = [document.label for document in listing.documents]
        held_out = {labels[n] for n in order[: max(1, round(fraction * len(documents)))]}
        selected = {number for number, label in enumerate(labels) if label in held_out}
        rows = []
        for row in listing.rows:
            if row.document not in selected:
                indices = [i for i, number in enumerate(row.negatives) if number not in selected]
                rows.append(select_negatives(row, indices))
        training_queries = {row.query for row in rows}
        validation_rows = [
            row
            for row in listing.rows
            if row.document in selected and row.query not in training_queries
        ]
        if not validation_rows:
            rule = "another fraction or {path: ...}"
            raise SpecError("validation", fraction, rule, "leaves no validation query")
        return listing.with_rows(rows), listing.with_rows(validation_rows)

    @property
    def num_batches(self) -> int:
        """Number of complete batches per epoch."""
        return len(self.training.rows) // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """Returns the rows (R,) in the order of an epoch."""
        random = np.random.default_rng([self.seed, epoch])
        num_rows = len(self._group_R)
        window_R = np.zeros(num_rows, dtype=np.int64)
        if (self._group_R >= 0).any():
            num_groups = int(self._group_R.max()) + 1
            # Rows without a row group are distributed at random.
            random_R = random.integers(num_groups, size=num_rows)
            group_R = np.where(self._group_R < 0, random_R, self._group_R)
            window_R = random.permutation(num_groups)[group_R] // self.spec.mixed_groups
        return np.lexsort((random.random(num_rows), window_R))

    def _sample_negatives(self, number: int, epoch: int) -> Row:
        row, maximum = self.training.rows[number], self.spec.num_negatives
        if maximum is None or len(row.negatives) <= maximum:
            return row
        random = np.random.default_rng([self.seed, epoch, number])
        indices = np.sort(random.choice(len(row.negatives), maximum, replace=False))
        return select_negatives(row, indices.tolist())

    # -- batches -----------------------------------------------------------------------------------

    def batches(self, epoch: int, first: int, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields the part of one worker of an epoch. The next batch is read in the background."""
        order_R = self.order(epoch)

        def read(number: int) -> Batch:
            start = number * self.batch_size
            numbers = order_R[start : start + self.batch_size].tolist()
            rows = [self._sample_negatives(row, epoch) for row in numbers]
            return self._batch(rows, worker, num_workers)

        from pipeline.encoders.batching import prefetch

        for _, batch in prefetch(range(first, self.num_batches), read):
            yield batch

    def full_pass(self, worker: int, num_workers: int) -> Iterator[Batch]:
        """Yields all queries, documents and hard negatives, including the last incomplete batch."""
        rows = self.training.rows
        used = {number: None for row in rows for number in (row.document, *row.negatives)}
        numbers = [NO_LABEL, *used][worker::num_workers]
        queries = list(self._positives)[worker::num_workers]
        size = min(self.batch_size, MAX_MEDIA_BATCH) if self._has_media else self.batch_size
        for start in range(0, max(len(numbers), len(queries)), size):
            part = slice(start, start + size)
            yield self._read(self.training, [(query, ()) for query in queries[part]], numbers[part])

    def _batch(self, rows: Sequence[Row], worker: int, num_workers: int) -> Batch:
        """Reads the part of one worker of the rows of a batch."""
        parts = [rows[worker_slice(len(rows), w, num_workers)] for w in range(num_workers)]
        owner: dict[int, int] = {}
        for w, part in enumerate(parts):
            for row in part:
                owner.setdefault(row.document, w)
        for w, part in enumerate(parts):
            for row in part:
                for number in row.negatives:
                    owner.setdefault(number, w)
        numbers_by_worker: list[list[int]] = [[] for _ in range(num_workers)]
        for number, w in owner.items():
            numbers_by_worker[w].append(number)
        size = max(map(len, numbers_by_worker))
        for numbers in numbers_by_worker:
            numbers += [NO_LABEL] * (size - len(numbers))
        numbers = numbers_by_worker[worker]

        labels = {self.training.documents[number].label for number in owner}
        relevant = [
            [n for n in self._positives[row.query] if self.training.documents[n].label in labels]
            for row in rows
        ]
        selected = worker_slice(len(rows), worker, num_workers)
        return self._read(
            self.training,
            list(zip([row.query for row in rows[selected]], relevant[selected], strict=True)),
            numbers,
            num_labels=max(map(len, relevant)),
            boxes=self._boxes(rows, numbers) if self._has_boxes else None,
            teacher=teacher_scores(rows[selected], list(itertools.chain(*numbers_by_worker)))
            if self.has_teacher
            else None,
        )

    def validation(self) -> Batch | None:
        """Returns the validation queries with their documents and phrases."""
        if self._validation is None:
            return None
        positives = self._validation.positives()
        numbers = list(dict.fromkeys(n for documents in positives.values() for n in documents))
        batch = self._read(self._validation, list(positives.items()), numbers)
        batch_row = {number: row for row, number in enumerate(numbers)}
        phrases = [
            (text, batch_row[row.document], boxes)
            for row in self._validation.rows
            for text, boxes in row.phrases
            if batch.document_keys[batch_row[row.document]] != NO_DOCUMENT
        ]
        return replace(batch, phrases=Phrases(*zip(*phrases, strict=True))) if phrases else batch

    def _read(
        self,
        listing: Listing,
        queries: Sequence[tuple[str, Sequence[int]]],
        numbers: Sequence[int],
        *,
        num_labels: int | None = None,
        boxes: list[np.ndarray] | None = None,
        teacher: torch.Tensor | None = None,
    ) -> Batch:
        """Reads queries and documents by number; `NO_LABEL` is a document without tokens."""
        import torch

        wanted = [None if n == NO_LABEL else listing.documents[n] for n in numbers]
        items = list(self._pool.map(self._load_item, wanted))
        documents = [
            document if item is not None else None
            for document, item in zip(wanted, items, strict=True)
        ]
        files = [row for row, document in enumerate(wanted) if document and document.media]
        if len(files) > 1 and all(documents[row] is None for row in files):
            first = listing.documents[numbers[files[0]]]
            kind = next(iter(first.media))
            problem = f"none of the {len(files)} files of a batch can be read"
            raise JobError(f"{problem}, such as the {kind} in {first.location}")

        if num_labels is None:
            num_labels = max((len(relevant) for _, relevant in queries), default=1)
        query_labels = torch.full((len(queries), max(1, num_labels)), NO_LABEL)
        for row, (_, relevant) in enumerate(queries):
            labels = [listing.documents[number].label for number in relevant]
            query_labels[row, : len(labels)] = torch.tensor(labels, dtype=torch.int64)
        document_labels = torch.full((len(numbers), 1), NO_LABEL)
        for row, document in enumerate(documents):
            if document is not None:
                document_labels[row] = document.label
        if boxes is not None:
            boxes = [b if d else NO_BOXES for b, d in zip(boxes, documents, strict=True)]
        return Batch(
            [query for query, _ in queries],
            [self._empty_item | (item or {}) for item in items],
            [self._key(document) if document else NO_DOCUMENT for document in documents],
            query_labels,
            document_labels,
            boxes=boxes,
            teacher=teacher,
        )

    # -- documents ---------------------------------------------------------------------------------

    def _load_item(self, document: Document | None) -> dict[str, Any] | None:
        """Returns a document as encoder input, or None for padding and unreadable files."""
        if document is None:
            return None
        if self._key(document) in self.cached_keys:
            return self._empty_item
        if self.is_fully_cached:
            return None
        item: dict[str, Any] = {"text": document.text}
        try:
            if document.image is not None:
                item["image"] = self._read_image(document.image)
            if _is_media(document):
                item |= decode_media(self.spec.media, document.video, document.audio)
        except (Unreadable, OSError) as error:
            self._log_unreadable(document, error)
            return None
        return item

    def _read_image(self, image: str | ImageCell | ArchiveMember) -> bytes:
        if isinstance(image, ArchiveMember):
            data = image.read()
        elif isinstance(image, str):
            with open_file(image) as file:
                data = file.read()
        else:
            data = self._image_reader.read(image)
        return decode(data, self.spec.max_pixels, MAX_INPUT_PIXELS)["image"]

    def _key(self, document: Document) -> str:
        """Returns the key of a document, which includes the decoding options of video and audio."""
        return f"{document.key} {self._settings}" if _is_media(document) else document.key

    @functools.cached_property
    def _settings(self) -> str:
        return config.digest(decoding_settings(self.spec.media))

    @functools.cached_property
    def _has_media(self) -> bool:
        return any(map(_is_media, self._documents))

    @functools.cached_property
    def _empty_item(self) -> dict[str, None]:
        """Empty values of all columns. Arrow derives the columns of a table from its first row."""
        names = ["text"]
        if any(document.image is not None for document in self._documents):
            names.append("image")
        if self._has_media:
            names += [*self.spec.media.inputs, "span"]
        return dict.fromkeys(names)

    @property
    def _documents(self) -> list[Document]:
        validation = self._validation.documents if self._validation else []
        return [*self.training.documents, *validation]

    def _log_unreadable(self, document: Document, error: Exception) -> None:
        """Logs the first, 10th, 100th ... failure only, because every batch may have one."""
        with self._lock:
            self._num_unreadable += 1
            count = self._num_unreadable
        if math.log10(count).is_integer():
            logger.warning(
                "the %s of %s (%s) cannot be read: %s; its queries have no positive (failure %d)",
                next(iter(document.media)),
                document.id,
                document.location,
                error,
                count,
            )

    @functools.cached_property
    def payload_kinds(self) -> frozenset[str]:
        """Kinds of content that any document has."""
        kinds = {"text"} if any(document.text for document in self._documents) else set()
        if any(document.image is not None for document in self._documents):
            kinds.add("image")
        return frozenset(kinds | (set(self.spec.media.inputs) if self._has_media else set()))

    @functools.cached_property
    def has_teacher(self) -> bool:
        """True if any row has teacher scores."""
        return any(row.scores is not None for row in self.training.rows)

    @functools.cached_property
    def _has_boxes(self) -> bool:
        listing = self.training
        return any(len(row.boxes) for row in listing.rows) or any(
            len(document.boxes) for document in listing.documents
        )

    @functools.cached_property
    def _rows_by_document(self) -> dict[int, list[Row]]:
        rows: dict[int, list[Row]] = {}
        for row in self.training.rows:
            rows.setdefault(row.document, []).append(row)
        return rows

    def _boxes(self, rows: Sequence[Row], numbers: Sequence[int]) -> list[np.ndarray]:
        """Returns the boxes of each document that the queries of a batch describe.

        Negatives have the boxes of all of their rows. If several captions have equal boxes, they
        are merged.
        """
        batch_rows: dict[int, list[Row]] = {}
        for row in rows:
            batch_rows.setdefault(row.document, []).append(row)
        found = []
        for number in numbers:
            if number == NO_LABEL:
                found.append(NO_BOXES)
                continue
            described = batch_rows.get(number) or self._rows_by_document.get(number, [])
            boxes = [self.training.documents[number].boxes, *(row.boxes for row in described)]
            found.append(np.unique(np.concatenate(boxes), axis=0))
        return found


def _is_media(document: Document) -> bool:
    return document.video is not None or document.audio is not None


def teacher_scores(rows: Sequence[Row], numbers: Sequence[int]) -> torch.Tensor:
    """Returns the teacher's scores of the documents with the given numbers. Unknown scores are NaN.

    >>> teacher_scores([Row("q", 3, (5,), (0.75, 0.25))], [5, 4, 3])
    tensor([[0.2500,    nan, 0.7500]])
    """
    import torch

    columns = {number: column for column, number in enumerate(numbers)}
    scores_QB = torch.full((len(rows), len(numbers)), torch.nan)
    for query, row in enumerate(rows):
        for number, score in zip((row.document, *row.negatives), row.scores or (), strict=False):
            if number in columns:
                scores_QB[query, columns[number]] = score
    return scores_QB
