"""Training data of pairs of a query and a document, in JSON lines or Parquet files."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from pipeline import config
from pipeline.config import SpecError, Uri
from pipeline.eval.boxes import NO_BOXES, check_boxes, drop_small_boxes
from pipeline.paths import is_uri
from pipeline.schema import is_blank
from pipeline.train.data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.train.data.rows import Document, Listing, Row, is_negative, logger, stable_hash
from pipeline.train.data.tables import LINES, TABLE, TableRow, list_files, read_rows, table_columns

#: Largest absolute score, within the range of float32.
MAX_SCORE = 3e38

#: Valid contents of a column of hard negatives.
NegativesKind = Literal["documents", "texts", "images", "videos", "sounds"]

#: Contents that are paths of files.
FILE_KINDS = ("images", "videos", "sounds")


class Columns(config.Spec):
    """Names of the columns."""

    query: str = "query"
    """Column of the queries."""
    text: str = "text"
    """Column of the documents' texts."""
    image: str = "image"
    """Column of the documents' images."""
    video: str = "video"
    """Column of the documents' videos."""
    audio: str = "audio"
    """Column of the documents' recordings."""
    document_id: str = "document_id"
    """Column of the documents' ids."""
    negatives: str = "negatives"
    """Column of the hard negatives."""
    scores: str = "scores"
    """Column of a teacher's scores, of the document first."""
    boxes: str = "boxes"
    """Column of the boxes of the query's objects."""


class PairsSpec(RowSpec):
    """Base class of the specs of pairs.

    `path` is a file, a folder or a glob of .jsonl, .jsonl.gz or .parquet files.
    """

    root: Uri | None = None
    """Folder that relative paths start from, or null for the folder of the file."""
    columns: Columns = Columns()
    """Names of the columns."""
    documents: Uri | None = None
    """Files of documents, with the columns `document_id` and those of the content, which rows and
    negatives refer to."""
    negatives_are: NegativesKind = "documents"
    """Contents of the column `negatives`."""


class PairData(RowData[PairsSpec]):
    """Base class of training data of pairs. See `Pairs`."""

    #: File name suffixes.
    suffixes: tuple[str, ...] = (*LINES, *TABLE)
    #: Whether rows without a query are skipped instead of raising an error.
    skips_rows_without_query = False

    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads the rows of `path`."""
        names, listing = self.spec.columns, Listing()
        if self.spec.documents is not None:
            with config.within("documents"):
                for row in self._read_files(self.spec.documents, "document_id", list_files):
                    listing.add(self._document(row, self._document_id(row)))
        rows: list[tuple[Row, TableRow]] = []
        num_skipped = 0
        for row in self._read_files(files.path, "query", self.files):
            query = row.fields.get(names.query)
            if query is None and self.skips_rows_without_query:
                num_skipped += 1
                continue
            is_text = isinstance(query, str) and not is_blank(query)
            self._require(is_text, row, "query", "a text with at least one word in each row")
            assert isinstance(query, str)
            number = self._add_document(listing, row)
            boxes = self._row_boxes(row)
            rows.append((Row(query, number, boxes=boxes), row))
        if num_skipped:
            message = "%d rows of %s are left out: they have no query"
            logger.warning(message, num_skipped, files.path)
        if not rows:
            raise SpecError("path", files.path, "files with at least one row", "contain none")
        listing.rows = [self._with_negatives(listing, row, table_row) for row, table_row in rows]
        return listing

    def files(self, uri: str, suffixes: tuple[str, ...]) -> list[str]:
        """Returns the files of a path."""
        return list_files(uri, suffixes)

    def _read_files(
        self, uri: str, required: str, files: Callable[[str, tuple[str, ...]], list[str]]
    ) -> Iterator[TableRow]:
        names = self.spec.columns
        # Compares values with defaults: a resolved spec sets all fields.
        fields = type(names).model_fields.items()
        optional = {name for name, info in fields if getattr(names, name) != info.default}
        optional -= {"query"}
        if required != "query" or self.spec.documents is not None:
            optional -= set(names.model_fields)  # either kind of file has some of them
        for file in files(uri, self.suffixes):
            columns = table_columns(file)
            if columns is not None:
                for field in (required, *sorted(optional)):
                    if getattr(names, field) not in columns:
                        raise _no_column(f"columns.{field}", getattr(names, field), file, columns)
                content = self._content
                if not {*content, names.document_id} & set(columns):
                    candidates = f"{', '.join(content)} or {names.document_id}"
                    raise _no_column("columns", candidates, file, columns)
            yield from read_rows(file, tuple(names.model_dump().values()), names.image)

    def _require(self, holds: object, row: TableRow, column: str, rule: str) -> None:
        """Raises `SpecError` unless the value of a column in a row is valid."""
        if not holds:
            name = getattr(self.spec.columns, column)
            field, note = f"columns.{column} ({name})", f" ({row.location})"
            raise SpecError(field, row.fields.get(name), rule, note=note)

    # -- documents ---------------------------------------------------------------------------------

    @property
    def _content(self) -> tuple[str, ...]:
        names = self.spec.columns
        return (names.text, names.image, names.video, names.audio)

    def _add_document(self, listing: Listing, row: TableRow) -> int:
        names = self.spec.columns
        document_id = self._document_id(row)
        has_content = row.cell is not None or any(
            row.fields.get(name) is not None for name in self._content
        )
        if has_content:
            return listing.add(self._document(row, document_id))
        if document_id in listing.numbers:
            return listing.numbers[document_id]
        rule = f"a row with a document ({', '.join(self._content)})"
        problem = None
        if document_id is not None:
            rule += f" or the {names.document_id} of an earlier one or of one in `documents`"
            problem = "is unknown"
        raise SpecError("path", document_id, rule, problem, f" ({row.location})")

    def _document_id(self, row: TableRow) -> str | None:
        name = self.spec.columns.document_id
        value = row.fields.get(name)
        if value is None:
            return None
        is_id = isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip()
        self._require(is_id, row, "document_id", "a string or an integer")
        return str(value)

    def _document(self, row: TableRow, document_id: str | None) -> Document:
        names = self.spec.columns
        text, image = row.fields.get(names.text), row.fields.get(names.image)
        path = image.get("path") if isinstance(image, dict) else image
        is_text = text is None or (isinstance(text, str) and text.strip())
        self._require(is_text, row, "text", "a text with at least one word, or null")
        image_path = path if isinstance(path, str) and path.strip() else None
        is_image = image is None or row.cell is not None or image_path is not None
        self._require(is_image, row, "image", "the path of an image, or its bytes in Parquet")
        video, audio = self._path("video", row), self._path("audio", row)
        rule = f"null when {names.image} is given"
        self._require(image is None or video is None, row, "video", rule)
        paths = [image_path or (row.location if row.cell else None), video, audio]
        if text is None and not any(paths):
            rule = f"the id of a document with content ({', '.join(self._content)})"
            raise SpecError("path", document_id, rule, "has no content", f" ({row.location})")
        if document_id is None:
            document_id = _id(text, next(filter(None, paths), None))
        image_location = row.cell or (image_path and self._uri(image_path, row.folder))
        media = [path and self._uri(path, row.folder) for path in (video, audio)]
        return Document(document_id, text, image_location, row.location, NO_BOXES, *media)

    def _path(self, field: str, row: TableRow) -> str | None:
        name = getattr(self.spec.columns, field)
        path = row.fields.get(name)
        is_path = path is None or (isinstance(path, str) and path.strip())
        self._require(is_path, row, field, "a path or null")
        return path

    def _uri(self, path: str, folder: str) -> str:
        return path if is_uri(path) else posixpath.join(self.spec.root or folder, path)

    # -- negatives and boxes -----------------------------------------------------------------------

    def _with_negatives(self, listing: Listing, row: Row, table_row: TableRow) -> Row:
        """Adds the negatives of a row. All documents must have been listed before."""
        names = self.spec.columns
        values = table_row.fields.get(names.negatives)
        scores = table_row.fields.get(names.scores)
        if values is None and scores is None:
            return row
        values = [] if values is None else values
        is_list = isinstance(values, list) and all(map(is_negative, values))
        rule = f"a list of {self.spec.negatives_are}, none of them empty"
        self._require(is_list, table_row, "negatives", rule)
        if scores is not None:
            is_list = isinstance(scores, list) and all(
                isinstance(s, int | float) and abs(s) <= MAX_SCORE for s in scores
            )
            rule = f"{1 + len(values)} numbers, for the document and each negative"
            is_complete = is_list and len(scores) == 1 + len(values)
            self._require(is_complete, table_row, "scores", rule)
        negatives = []
        for value in map(str, values):
            if self.spec.negatives_are == "texts":
                document = Document(_id(value, None), value, None, table_row.location)
                negatives.append(listing.add(document))
            elif (kind := self.spec.negatives_are) in FILE_KINDS:
                uri = self._uri(value, table_row.folder)
                document = Document(
                    _id(None, value),
                    None,
                    image=uri if kind == "images" else None,
                    location=table_row.location,
                    video=uri if kind == "videos" else None,
                    audio=uri if kind == "sounds" else None,
                )
                negatives.append(listing.add(document))
            elif value in listing.numbers:
                negatives.append(listing.numbers[value])
            else:
                field, note = f"columns.negatives ({names.negatives})", f" ({table_row.location})"
                rule = "the id of a document in the rows or in `documents`"
                raise SpecError(field, value, rule, note=note)
        teacher = None if scores is None else tuple(map(float, scores))
        return replace(row, negatives=tuple(negatives), scores=teacher)

    def _row_boxes(self, row: TableRow) -> np.ndarray:
        name = self.spec.columns.boxes
        boxes = row.fields.get(name)
        if boxes is None:
            return NO_BOXES
        return drop_small_boxes(check_boxes(boxes, f"columns.boxes ({name})", row.location))


class Pairs(PairData):
    """Rows that consist of a query and a relevant document, with optional hard negatives.

    A row contains a `query` and a document. The document is a `text`, an `image`, a `video`, an
    `audio` or a combination of them, where `image` and `video` exclude each other. Alternatively,
    `document_id` refers to the document of another row or of the file `documents`. Media are given
    as paths. In Parquet files, `image` may also be bytes or a struct of bytes and path. `audio`
    replaces the audio of a video.

    All documents in rows with the same query are relevant to it. Two rows refer to the same
    document if they have the same `document_id`. Without an id, the paths of their image, video or
    audio are compared, or else their texts. An image in a table that has neither an id nor a path
    is always a separate document.

    `negatives` is a list of document ids, or of texts or paths, depending on `negatives_are`.
    `scores` is a list of the teacher's scores of the document and of each negative. `boxes` is a
    list of boxes that the query describes, [x0, y0, x1, y1] relative to the image size.
    """

    class Spec(PairsSpec):
        """Training data in pairs."""

        name: Literal["pairs"] = "pairs"


class PageColumns(Columns):
    """Names of the columns of ColPali's training set."""

    document_id: str = "image_filename"


class ColPaliTrain(PairData):
    """Training data in the format of `vidore/colpali_train_set`.

    The data are Parquet files with the columns `image` and `query`. A page is a single document,
    which is identified by its `image_filename`, even if it has several queries. In a folder, only
    the files of the split `train` are read. Rows without a query are skipped.
    """

    class Spec(PairsSpec):
        """Training data in ColPali's format."""

        name: Literal["colpali_train"] = "colpali_train"
        columns: PageColumns = PageColumns()

    suffixes = TABLE
    skips_rows_without_query = True

    def files(self, uri: str, suffixes: tuple[str, ...]) -> list[str]:
        """Returns the files of a folder that are named train-*, or all files if none is."""
        files = list_files(uri, suffixes)
        return [file for file in files if posixpath.basename(file).startswith("train-")] or files


def _id(text: str | None, path: str | None) -> str:
    """Returns an id for a document that has no id in the data."""
    if path is not None:
        return path
    return f"text {stable_hash(text or ''):x}"


def _no_column(field: str, value: str, file: str, columns: list[str]) -> SpecError:
    return SpecError.unknown_name(field, value, columns, f"is not a column of {file}")
