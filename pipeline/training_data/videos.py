"""Videos and queries that they are relevant to: the forms of MSR-VTT and of MultiVENT 2.0."""

from __future__ import annotations

import csv
import io
import math
import posixpath
from collections.abc import Collection, Iterator
from typing import Any, Literal, Self

from pydantic import model_validator

from pipeline import distributed
from pipeline.config import SpecError, Uri
from pipeline.sources.files import existing_root, files_below
from pipeline.training_data.captions import read_file, read_json
from pipeline.training_data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.training_data.rows import NO_BOXES, Document, Listing, Row, logger
from pipeline.training_data.tables import LINES, files_of, read_rows

VIDEO, SOUND = ".mp4", ".m4a"


class Msrvtt(RowData["Msrvtt.Spec"]):
    """The form of MSR-VTT: videos as documents, the sentences about them as queries.

    `path` is `MSRVTT_data.json`. `validation.path` is a file in the form of
    `MSRVTT_JSFUSION_test.csv`, whose rows have a `video_id` and a `sentence`. A document's id is
    its `video_id`, its file `<video_id>.mp4`, in whichever folder below `videos`. Videos with the
    same sentence are all relevant to it.
    """

    class Spec(RowSpec):
        """Which files.

        Attributes:
            path: .json with `videos` and `sentences`.
            videos: the folder of the files.
            ids: a .csv with the videos that are trained on as `video_id`, such as
                `MSRVTT_train.9k.csv`; null: those of `splits`.
            splits: the splits that are trained on, of the videos' own, such as [train].
        """

        name: Literal["msrvtt"] = "msrvtt"
        videos: Uri
        ids: Uri | None = None
        splits: list[str] | None = None

        @model_validator(mode="after")
        def _says_which(self) -> Self:
            if (self.ids is None) == (self.splits is None):
                rule = "a file of ids such as MSRVTT_train.9k.csv, or null when splits is set"
                raise SpecError("ids", self.ids, rule)
            return self

    def listing(self) -> Listing:
        """The sentences of `path` about the videos of `ids` or `splits`."""
        uri = self.spec.path
        splits, sentences = _msrvtt(uri)
        if self.spec.ids is None:
            there = sorted(set(splits.values()))
            named = self.spec.splits or []
            for split in named:
                if split not in there:
                    problem = f"is not a split of {uri}"
                    raise SpecError.unknown_name("splits", split, there, problem)
            wanted = {video for video, split in splits.items() if split in named}
        else:
            wanted = set()
            for location, row in read_csv(self.spec.ids, ("video_id",), "ids"):
                if row["video_id"] not in splits:
                    rule = f"the id of a video of {uri}"
                    raise SpecError("ids", row["video_id"], rule, note=f" ({location})")
                wanted.add(row["video_id"])
        return self._listed(uri, (each for each in sentences if each[1] in wanted))

    def validation_listing(self) -> Listing:
        """Returns the sentences of `validation.path`."""
        assert isinstance(self.spec.validation, ValidationFiles)
        uri = self.spec.validation.path
        rows = read_csv(uri, ("video_id", "sentence"), "path")
        return self._listed(uri, ((location, r["video_id"], r["sentence"]) for location, r in rows))

    def _listed(self, uri: str, sentences: Iterator[tuple[str, str, Any]]) -> Listing:
        """Lists sentences, each with its location, the id of its video and its text."""
        files, listing = Files(self.spec.videos), Listing()
        for location, video, sentence in sentences:
            _check_text(sentence, "path", location)
            number = listing.numbers.get(video)
            if number is None:
                number = listing.add(files.document(video, location))
            listing.rows.append(Row(sentence.strip(), number))
        if not listing.rows:
            raise SpecError("path", uri, "a file with at least one sentence", "has none")
        return listing


def _msrvtt(uri: str) -> tuple[dict[str, str], list[tuple[str, str, Any]]]:
    """Reads MSR-VTT's JSON.

    Returns:
        The split of each video; and the location, video and unchecked text of each sentence.
    """
    value = read_json(uri, "path")
    rule = "MSR-VTT's {videos: [{video_id, split}], sentences: [{video_id, caption}]}"
    named = value if isinstance(value, dict) else {}
    videos, captions = named.get("videos"), named.get("sentences")
    if not isinstance(videos, list) or not isinstance(captions, list):
        raise SpecError("path", uri, rule, "has another format")
    splits: dict[str, str] = {}
    for number, video in enumerate(videos):
        location = f"video {number} of {uri}"
        own = video.get("video_id") if isinstance(video, dict) else video
        if not isinstance(own, str) or not own or not isinstance(video, dict):
            raise SpecError("path", own, rule, note=f" ({location})")
        splits[own] = str(video.get("split", ""))
    sentences = []
    for number, sentence in enumerate(captions):
        location = f"sentence {number} of {uri}"
        if not isinstance(sentence, dict):
            raise SpecError("path", sentence, rule, note=f" ({location})")
        own = sentence.get("video_id")
        if not isinstance(own, str) or own not in splits:
            raise SpecError("path", own, "the video_id of a video", note=f" ({location})")
        sentences.append((location, own, sentence.get("caption")))
    return splits, sentences


class MultiventValidationFiles(ValidationFiles):
    """Queries and judgments of the same form; of other videos, where they lie elsewhere."""

    judgments: Uri
    """File of the judgments."""
    videos: Uri | None = None
    """Folder of the videos; null: that of the training data."""


class Multivent(RowData["Multivent.Spec"]):
    """The form of MultiVENT 2.0: queries in CSV, and in JSON lines which videos are relevant.

    `path` has the columns `Query_id` and `query`; `judgments` lines {"query_id", "doc_id",
    "relevance"}: what is more than 0 is relevant. A query that nothing is relevant to is left out.
    A document's id is its `doc_id`, its file `<doc_id>.mp4`, in whichever folder below `videos`,
    such as one for each shard. Its sound is that of `<doc_id>.m4a`, if there is one, else its own.
    """

    class Spec(RowSpec):
        """Which files.

        Attributes:
            path: .csv of queries.
            judgments: .jsonl.
            videos: the folder of the videos.
        """

        name: Literal["multivent"] = "multivent"
        judgments: Uri
        videos: Uri
        validation: float | MultiventValidationFiles | None = None

    def listing(self) -> Listing:
        """The judged queries of `path`."""
        return self._list(self.spec.path, self.spec.judgments, self.spec.videos)

    def validation_listing(self) -> Listing:
        """Returns the judged queries of `validation.path`."""
        validation = self.spec.validation
        assert isinstance(validation, MultiventValidationFiles)
        return self._list(
            validation.path, validation.judgments, validation.videos or self.spec.videos
        )

    def _list(self, uri: str, judgments: str, videos: str) -> Listing:
        queries: dict[str, str] = {}
        for location, row in read_csv(uri, ("Query_id", "query"), "path"):
            _check_text(row["query"], "path", location)
            if row["Query_id"] in queries:
                raise SpecError(
                    "path", row["Query_id"], "a unique query id", "occurs twice", f" ({location})"
                )
            queries[row["Query_id"]] = row["query"].strip()
        files, listing = Files(videos), Listing()
        judged: set[str] = set()
        pairs: set[tuple[str, str]] = set()
        for location, query, own in _relevant(judgments):
            if query not in queries:
                rule = f"the id of a query of {uri}"
                raise SpecError("judgments", query, rule, note=f" ({location})")
            if (query, own) not in pairs:
                pairs.add((query, own))
                judged.add(query)
                number = listing.numbers.get(own)
                if number is None:
                    number = listing.add(files.document(own, location))
                listing.rows.append(Row(queries[query], number))
        if not listing.rows:
            rule = "a file with at least one relevance above 0"
            raise SpecError("judgments", judgments, rule, "has none")
        if len(judged) < len(queries) and distributed.rank() == 0:
            text = "%d of %d queries of %s are left out: nothing is relevant to them"
            logger.warning(text, len(queries) - len(judged), len(queries), uri)
        return listing


def _relevant(uri: str) -> Iterator[tuple[str, str, str]]:
    """Where each relevant pair stands, and the ids of its query and its video."""
    rule = 'a line {"query_id": "...", "doc_id": "...", "relevance": a number >= 0}'
    try:
        for file in files_of(uri, LINES, "judgments"):
            for line in read_rows(file, ("query_id", "doc_id", "relevance")):
                query, own = line.fields.get("query_id"), line.fields.get("doc_id")
                grade = line.fields.get("relevance")
                if not isinstance(grade, int | float) or isinstance(grade, bool):
                    raise SpecError("path", line.fields, rule, note=f" ({line.location})")
                if not (_is_id(query) and _is_id(own) and 0 <= grade < math.inf):
                    raise SpecError("path", line.fields, rule, note=f" ({line.location})")
                if grade > 0:
                    yield line.location, str(query), str(own)
    except SpecError as error:
        raise error.at("judgments") from None


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _check_text(text: Any, field: str, location: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise SpecError(field, text, "a text with at least one word", note=f" ({location})")


class Files:
    """The videos below a folder, and the files of their sound, by their names without suffix.

    Raises:
        SpecError: for `videos`: there is no such folder.
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
        for path, _ in files_below(folder, (VIDEO, SOUND)):
            self._found.setdefault(posixpath.basename(path), posixpath.join(folder, path))

    def document(self, own_id: str, location: str) -> Document:
        """A video as a document; one that is not there as if it lay in the folder."""
        name = f"{own_id}{VIDEO}"
        video = self._found.get(name) or posixpath.join(self._folder, name)
        sound = self._found.get(f"{own_id}{SOUND}")
        return Document(own_id, None, None, location, NO_BOXES, video, sound)


def read_csv(
    uri: str, columns: Collection[str], field: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each row of a CSV file with a header stands, and what it has in some columns.

    Raises:
        SpecError: for `field`: the file is not there or damaged, or has no such column.
    """
    data = read_file(uri, field)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(field, uri, "a UTF-8 file", f"is malformed in line {line}") from None
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(rows, [])
        for column in columns:
            if column not in header:
                problem = f"is not a column of {uri}"
                raise SpecError.unknown_name(field, column, header, problem)
        for row in filter(None, rows):
            location = f"line {rows.line_num} of {uri}"
            if len(row) != len(header):
                shown = ", ".join(header)
                raise SpecError(field, row, f"a row of {shown}", note=f" ({location})")
            own = dict(zip(header, row, strict=True))
            yield location, {column: own[column] for column in columns}
    except csv.Error as error:
        problem = f"is malformed in line {rows.line_num} ({error})"
        raise SpecError(field, uri, "a valid CSV file", problem) from None
