"""Pairs of a query and its document, in JSON lines or Parquet."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from pipeline import config
from pipeline.config import SpecError, Uri
from pipeline.training_data.boxes import checked
from pipeline.training_data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.training_data.rows import NO_BOXES, Document, Listing, Row, hash_of, logger
from pipeline.training_data.tables import LINES, TABLE, TableRow, columns_of, files_of, read_rows

#: A score that float32 has.
LARGEST = 3e38

#: What a column of hard negatives may name.
Named = Literal["documents", "texts", "images", "videos", "sounds"]

#: Those that are paths of files.
FILES = ("images", "videos", "sounds")


class Columns(config.Spec):
    """What the columns of the files are called."""

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
    """Base of the specs of pairs.

    Attributes:
        path: a file, a folder or a glob of .jsonl, .jsonl.gz or .parquet.
        root: the folder that paths start from; null: that of the file.
        columns: names of the columns.
        documents: files of documents that rows and negatives name: `document_id` with what a
            document has.
        negatives_are: what the column `negatives` lists.
    """

    root: Uri | None = None
    columns: Columns = Columns()
    documents: Uri | None = None
    negatives_are: Named = "documents"


class PairData(RowData[PairsSpec]):
    """Base of training data of pairs, see `Pairs`."""

    #: What the names of files in a folder end in.
    suffixes: tuple[str, ...] = (*LINES, *TABLE)
    #: Whether a row without a query is left out, and not an error.
    leaves_out = False

    def listing(self) -> Listing:
        """All rows of `path`."""
        return self._list(self.spec.path)

    def validation_listing(self) -> Listing:
        """Returns the rows of `validation.path`."""
        assert isinstance(self.spec.validation, ValidationFiles)
        return self._list(self.spec.validation.path)

    def _list(self, uri: str) -> Listing:
        names, listing = self.spec.columns, Listing()
        if self.spec.documents is not None:
            with config.within("documents"):
                for row in self._read_files(self.spec.documents, "document_id", files_of):
                    listing.add(self._document(row, self._id_of(row)))
        named: list[tuple[Row, TableRow]] = []
        num_left_out = 0
        for row in self._read_files(uri, "query", self.files):
            query = row.fields.get(names.query)
            if query is None and self.leaves_out:
                num_left_out += 1
                continue
            if not isinstance(query, str) or not query.strip():
                rule = "a text with at least one word in each row"
                raise SpecError(
                    f"columns.query ({names.query})", query, rule, note=f" ({row.location})"
                )
            number = self._number(listing, row)
            boxes = self._row_boxes(row)
            named.append((Row(query, number, boxes=boxes), row))
        if num_left_out:
            logger.warning("%d rows of %s are left out: they have no query", num_left_out, uri)
        if not named:
            raise SpecError("path", uri, "files with at least one row", "contain none")
        listing.rows = [self._with_negatives(listing, own, row) for own, row in named]
        return listing

    def files(self, uri: str, suffixes: tuple[str, ...]) -> list[str]:
        """The files of a path."""
        return files_of(uri, suffixes)

    def _read_files(
        self, uri: str, needed: str, files: Callable[[str, tuple[str, ...]], list[str]]
    ) -> Iterator[TableRow]:
        """The rows of files, each of which has the needed column and one that tells a document."""
        names = self.spec.columns
        # A spec that was written out and read again names all of them.
        own = type(names).model_fields.items()
        optional = {field for field, about in own if getattr(names, field) != about.default}
        optional -= {"query"}
        if needed != "query" or self.spec.documents is not None:
            optional -= set(names.model_fields)  # either kind of file has some of them
        for file in files(uri, self.suffixes):
            there = columns_of(file)
            if there is not None:
                for field in (needed, *sorted(optional)):
                    if getattr(names, field) not in there:
                        raise _no_column(f"columns.{field}", getattr(names, field), file, there)
                content = self._content
                if not {*content, names.document_id} & set(there):
                    several = f"{', '.join(content)} or {names.document_id}"
                    raise _no_column("columns", several, file, there)
            yield from read_rows(file, tuple(names.model_dump().values()), names.image)

    # -- documents ---------------------------------------------------------------------------------

    @property
    def _content(self) -> tuple[str, ...]:
        """The columns that a document is in."""
        names = self.spec.columns
        return (names.text, names.image, names.video, names.audio)

    def _number(self, listing: Listing, row: TableRow) -> int:
        """The number of a row's document."""
        names = self.spec.columns
        own = self._id_of(row)
        has_content = row.cell is not None or any(
            row.fields.get(name) is not None for name in self._content
        )
        if has_content:
            return listing.add(self._document(row, own))
        if own in listing.numbers:
            return listing.numbers[own]
        rule = f"a row with a document ({', '.join(self._content)})"
        if own is None:
            raise SpecError("path", None, rule, note=f" ({row.location})")
        rule = f"{rule} or the {names.document_id} of an earlier one or of one in `documents`"
        raise SpecError("path", own, rule, "is unknown", f" ({row.location})")

    def _id_of(self, row: TableRow) -> str | None:
        name = self.spec.columns.document_id
        own = row.fields.get(name)
        if own is None:
            return None
        if not isinstance(own, str | int) or isinstance(own, bool) or not str(own).strip():
            rule = "a string or an integer"
            raise SpecError(f"columns.document_id ({name})", own, rule, note=f" ({row.location})")
        return str(own)

    def _document(self, row: TableRow, own_id: str | None) -> Document:
        names = self.spec.columns
        text, image = row.fields.get(names.text), row.fields.get(names.image)
        path = image.get("path") if isinstance(image, dict) else image
        if text is not None and (not isinstance(text, str) or not text.strip()):
            rule = "a text with at least one word, or null"
            raise SpecError(f"columns.text ({names.text})", text, rule, note=f" ({row.location})")
        picture_path = path if isinstance(path, str) and path.strip() else None
        if image is not None and row.cell is None and picture_path is None:
            rule = "the path of an image, or its bytes in Parquet"
            raise SpecError(
                f"columns.image ({names.image})", image, rule, note=f" ({row.location})"
            )
        video, audio = self._path("video", row), self._path("audio", row)
        if image is not None and video is not None:
            rule = f"null when {names.image} is given"
            raise SpecError(
                f"columns.video ({names.video})", video, rule, note=f" ({row.location})"
            )
        places = [picture_path or (row.location if row.cell else None), video, audio]
        if text is None and not any(places):
            rule = f"the id of a row with {', '.join(self._content)}"
            raise SpecError("path", own_id, rule, "has none", f" ({row.location})")
        if own_id is None:
            own_id = _id(text, next(filter(None, places), None))
        picture = row.cell or (picture_path and self._place(picture_path, row.folder))
        media = [own and self._place(own, row.folder) for own in (video, audio)]
        return Document(own_id, text, picture, row.location, NO_BOXES, *media)

    def _path(self, field: str, row: TableRow) -> str | None:
        """What a column of paths has."""
        name = getattr(self.spec.columns, field)
        path = row.fields.get(name)
        if path is not None and (not isinstance(path, str) or not path.strip()):
            raise SpecError(
                f"columns.{field} ({name})", path, "a path or null", note=f" ({row.location})"
            )
        return path

    def _place(self, path: str, folder: str) -> str:
        """The URI of a file that a row names."""
        return path if "://" in path else posixpath.join(self.spec.root or folder, path)

    # -- negatives and boxes -----------------------------------------------------------------------

    def _with_negatives(self, listing: Listing, own: Row, row: TableRow) -> Row:
        """A row with its negatives, once all documents are known."""
        names = self.spec.columns
        values, scores = row.fields.get(names.negatives), row.fields.get(names.scores)
        if values is None and scores is None:
            return own
        values = [] if values is None else values
        field = f"columns.negatives ({names.negatives})"
        if not isinstance(values, list) or any(not isinstance(v, str | int) for v in values):
            rule = f"a list of {self.spec.negatives_are}"
            raise SpecError(field, values, rule, note=f" ({row.location})")
        if scores is not None:
            is_list = isinstance(scores, list) and all(
                isinstance(s, int | float) and abs(s) <= LARGEST for s in scores
            )
            if not is_list or len(scores) != 1 + len(values):
                rule = f"{1 + len(values)} numbers, for the document and each negative"
                named = f"columns.scores ({names.scores})"
                raise SpecError(named, scores, rule, note=f" ({row.location})")
        negatives = []
        for value in map(str, values):
            if self.spec.negatives_are == "texts":
                document = Document(_id(value, None), value, None, row.location)
                negatives.append(listing.add(document))
            elif (kind := self.spec.negatives_are) in FILES:
                uri = self._place(value, row.folder)
                document = Document(
                    _id(None, value),
                    None,
                    picture=uri if kind == "images" else None,
                    location=row.location,
                    video=uri if kind == "videos" else None,
                    sound=uri if kind == "sounds" else None,
                )
                negatives.append(listing.add(document))
            elif value in listing.numbers:
                negatives.append(listing.numbers[value])
            else:
                rule = "the id of a document in the rows or in `documents`"
                raise SpecError(field, value, rule, note=f" ({row.location})")
        given = None if scores is None else tuple(map(float, scores))
        return replace(own, negatives=tuple(negatives), scores=given)

    def _row_boxes(self, row: TableRow) -> np.ndarray:
        name = self.spec.columns.boxes
        boxes = row.fields.get(name)
        return (
            NO_BOXES if boxes is None else checked(boxes, f"columns.boxes ({name})", row.location)
        )


class Pairs(PairData):
    """Rows of a query and a document that is relevant to it, and perhaps some that are not.

    A row has `query`; and one or several of `text`, `image` or `video`, and `audio`, or the
    `document_id` of a document that another row or the file `documents` has. They are paths;
    `image` in Parquet also the bytes, or a struct of bytes and path. A video has the sound of
    `audio`, or else its own. Rows with the same query share their documents: all are relevant. Rows
    with the same document (the same `document_id`; without one the same path of a picture, a video
    or sound, or else the same text) are about one document; a picture in a table without an id and
    a path is one of its own.

    `negatives` lists ids of documents; or texts or paths, if `negatives_are` says so.
    `scores` lists a teacher's scores, of the document and then of each negative. `boxes` lists
    boxes of what the query speaks of, [x0, y0, x1, y1] as shares of the picture.
    """

    class Spec(PairsSpec):
        """Which files, and what their columns are called."""

        name: Literal["pairs"] = "pairs"


class PageColumns(Columns):
    """What the columns of ColPali's training set are called."""

    document_id: str = "image_filename"


class ColPaliTrain(PairData):
    """The form of `vidore/colpali_train_set`: Parquet with the columns `image` and `query`.

    A page is one document, whatever the number of its questions, by its `image_filename`. Of a
    folder the files of the part `train` are read; a row without a query is left out.
    """

    class Spec(PairsSpec):
        """Which files."""

        name: Literal["colpali_train"] = "colpali_train"
        columns: PageColumns = PageColumns()

    suffixes = TABLE
    leaves_out = True

    def files(self, uri: str, suffixes: tuple[str, ...]) -> list[str]:
        """Of a folder those that are called train-*, or all."""
        every = files_of(uri, suffixes)
        return [file for file in every if posixpath.basename(file).startswith("train-")] or every


def _id(text: str | None, path: str | None) -> str:
    """The id of a document that has none."""
    if path is not None:
        return path
    return f"text {hash_of(text or ''):x}"


def _no_column(field: str, value: str, file: str, there: list[str]) -> SpecError:
    return SpecError.unknown_name(field, value, there, f"is not a column of {file}")
