"""Videos with relevant queries, in the formats of MSR-VTT and MultiVENT 2.0."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator
from typing import Any, Literal

from pipeline import distributed
from pipeline.config import SpecError, Uri
from pipeline.eval.boxes import NO_BOXES
from pipeline.schema import is_blank
from pipeline.sources.annotations import read_csv
from pipeline.sources.files import existing_root, find_files
from pipeline.training_data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.training_data.rows import Document, Listing, Row, logger
from pipeline.training_data.tables import LINES, list_files, read_rows

VIDEO, AUDIO = ".mp4", ".m4a"


class MultiventValidationFiles(ValidationFiles):
    """Validation queries and judgments in the same format."""

    judgments: Uri
    """JSON lines of relevance judgments."""
    videos: Uri | None = None
    """Folder of the validation videos, or null for that of the training videos."""


class Multivent(RowData["Multivent.Spec"]):
    """Training data in the format of MultiVENT 2.0: queries in CSV, judgments in JSON lines.

    `path` has the columns `Query_id` and `query`. `judgments` has lines {"query_id", "doc_id",
    "relevance"}. A relevance above 0 means relevant. Queries without a relevant video are left out.
    The id of a document is its `doc_id`, and its file is `<doc_id>.mp4` in any folder below
    `videos`, such as one per shard. If `<doc_id>.m4a` exists, it replaces the audio of the video.
    """

    class Spec(RowSpec):
        """Training data in MultiVENT's format."""

        name: Literal["multivent"] = "multivent"
        judgments: Uri
        """JSON lines of relevance judgments."""
        videos: Uri
        """Folder of the videos."""
        validation: float | MultiventValidationFiles | None = None
        """Validation data: a fraction of the documents with their queries, or {path: ...,
        judgments: ..., videos: ...}, or null for none."""

    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads the judged queries of `path`."""
        assert isinstance(files, Multivent.Spec | MultiventValidationFiles)
        uri, judgments, videos = files.path, files.judgments, files.videos or self.spec.videos
        queries: dict[str, str] = {}
        for location, row in read_csv(uri, ("Query_id", "query"), "path"):
            _check_text(row["query"], "path", location)
            if row["Query_id"] in queries:
                raise SpecError(
                    "path", row["Query_id"], "a unique query id", "occurs twice", f" ({location})"
                )
            queries[row["Query_id"]] = row["query"].strip()
        files, listing = VideoFiles(videos), Listing()
        judged: set[str] = set()
        pairs: set[tuple[str, str]] = set()
        for location, query, document_id in _relevant_pairs(judgments):
            if query not in queries:
                rule = f"the id of a query of {uri}"
                raise SpecError("judgments", query, rule, note=f" ({location})")
            if (query, document_id) not in pairs:
                pairs.add((query, document_id))
                judged.add(query)
                number = listing.numbers.get(document_id)
                if number is None:
                    number = listing.add(files.document(document_id, location))
                listing.rows.append(Row(queries[query], number))
        if not listing.rows:
            rule = "a file with at least one relevance above 0"
            raise SpecError("judgments", judgments, rule, "contains no such relevance")
        if len(judged) < len(queries) and distributed.rank() == 0:
            message = "%d of %d queries of %s are left out: they have no relevant video"
            logger.warning(message, len(queries) - len(judged), len(queries), uri)
        return listing


def _relevant_pairs(uri: str) -> Iterator[tuple[str, str, str]]:
    """Yields the location, the query id and the video id of all relevant pairs."""
    rule = 'a line {"query_id": "...", "doc_id": "...", "relevance": a number >= 0}'
    try:
        for file in list_files(uri, LINES, "judgments"):
            for line in read_rows(file, ("query_id", "doc_id", "relevance")):
                query, document_id = line.fields.get("query_id"), line.fields.get("doc_id")
                grade = line.fields.get("relevance")
                if not isinstance(grade, int | float) or isinstance(grade, bool):
                    raise SpecError("path", line.fields, rule, note=f" ({line.location})")
                if not (_is_id(query) and _is_id(document_id) and 0 <= grade < math.inf):
                    raise SpecError("path", line.fields, rule, note=f" ({line.location})")
                if grade > 0:
                    yield line.location, str(query), str(document_id)
    except SpecError as error:
        raise error.at("judgments") from None


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _check_text(text: Any, field: str, location: str) -> None:
    if not isinstance(text, str) or is_blank(text):
        raise SpecError(field, text, "a text with at least one word", note=f" ({location})")


class VideoFiles:
    """Video files in a folder and their audio files, by their names without suffixes.

    Raises:
        SpecError: For `videos`: the folder does not exist.
    """

    def __init__(self, folder: str):
        try:
            fs, root = existing_root(folder)
        except SpecError as error:
            raise error.at("videos") from None
        if not fs.isdir(root):
            raise SpecError("videos", folder, "a folder of videos", "is not a folder")
        self._folder = folder
        self._found: dict[str, str] = {}
        for path, _ in find_files(folder, (VIDEO, AUDIO)):
            self._found.setdefault(posixpath.basename(path), posixpath.join(folder, path))

    def document(self, document_id: str, location: str) -> Document:
        """Returns a video as a document. Missing files are expected in the folder itself."""
        name = f"{document_id}{VIDEO}"
        video = self._found.get(name) or posixpath.join(self._folder, name)
        audio = self._found.get(f"{document_id}{AUDIO}")
        return Document(document_id, None, None, location, NO_BOXES, video, audio)
