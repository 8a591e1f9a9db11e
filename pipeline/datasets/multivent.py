"""MultiVENT 2.0: event-centric video retrieval, with recognised text of the videos.

- Shards such as `000001.tar` have `<id>.mp4`, and may have `<id>.m4a` and `<id>.json`.
- `multivent_2_ids.csv` has the ids of the videos.
- `multivent_2_train_queries.csv` and `multivent_2_test_queries.csv` have the queries.
- `multivent_2_train_judgments.jsonl` and `multivent_2_test_judgments.jsonl` have the judgments.
- Archives such as `whisper_asr.zip` and `paddle_ocr.zip` have recognised text.
- `Qwen3-Omni-30B-A3B-Instruct_captions.jsonl` has captions of the test set, `doc_id` and `text`.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from pipeline import config
from pipeline.config import MissingField, SpecError, Uri, within
from pipeline.data.audio import Audio
from pipeline.data.base import make_revision
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import open_file
from pipeline.data.media import SIDECAR_BYTES, MediaFile, Member
from pipeline.data.video import Video
from pipeline.datasets.files import check_text, read_csv
from pipeline.datasets.items import SelectedVideos
from pipeline.datasets.queries import CollectionQueries, QueriesSpec
from pipeline.datasets.rows import list_videos
from pipeline.eval import BenchmarkRow
from pipeline.eval.metrics import Run, means, per_query
from pipeline.eval.topics import group_categories
from pipeline.runtime.atomic import open_atomic, write_atomic
from pipeline.schema import Item, Reject
from pipeline.train.data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.train.data.rows import Listing, warn
from pipeline.train.data.tables import LINES, list_files, read_rows

if TYPE_CHECKING:
    from pipeline.data.recognise.precomputed import Precomputed

#: YouTube ids of the train set, and numbers of the test set. Some lists contain other lines.
VIDEO_ID = re.compile(r"[A-Za-z0-9_-]{11}|\d+")
SOUND, METADATA = ".m4a", ".json"
#: Parts of the text of an item, in the order in which they are joined.
TextPart = Literal["title", "description", "caption", "ocr", "asr"]
#: Parts that are read from files, by the field of these files.
FEATURES: dict[str, TextPart] = {"ocr": "ocr", "asr": "asr", "captions": "caption"}
#: Official metrics. Unjudged videos are not relevant, and the gain of a grade is the grade.
MEASURES = ("nDCG@10", "R@10", "R@100", "R@1000", "AP", "RR", "Judged@10")
#: Parts of the query ids of the train set, `internvid_<language>_..._<channel>_<number>`.
ID_PARTS = ("language", "category", "style", "channel")
#: Number of parts of such an id, including the prefix and the number.
NUM_ID_PARTS = 6
MAX_GRADE = 3


def read_ids(uri: str) -> frozenset[str]:
    """Returns the ids in the column `id` of a CSV file. Lines that are not ids are ignored."""
    rows = read_csv(uri, ("id",), "video_ids")
    ids = frozenset(row["id"] for _, row in rows if VIDEO_ID.fullmatch(row["id"]))
    if not ids:
        raise SpecError("video_ids", uri, "a file with at least one video id", "has none")
    return ids


def read_metadata(text: str | None) -> dict[str, str]:
    """Returns the title, the description and the caption of a video, as far as they are known.

    >>> read_metadata('{"caption": "c", "yt_meta_dict": {"info": {"title": "t"}}}')
    {'title': 't', 'description': '', 'caption': 'c'}
    """
    try:
        fields = json.loads(text or "{}")
        info = fields.get("yt_meta_dict", {}).get("info", {})
        values = {name: info.get(name) for name in ("title", "description")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise Unreadable("corrupted sidecar", f"{METADATA}: {error}") from None
    values["caption"] = fields.get("caption")
    return {name: value if isinstance(value, str) else "" for name, value in values.items()}


def read_queries(uri: str) -> dict[str, str]:
    """Returns the queries of a CSV file with `Query_id` and `query`, by id."""
    queries: dict[str, str] = {}
    for location, row in read_csv(uri, ("Query_id", "query"), "path"):
        query_id, text = row["Query_id"], check_text(row["query"], "path", location)
        if query_id in queries:
            note = f" ({location})"
            raise SpecError("path", query_id, "a unique query id", "occurs twice", note)
        queries[query_id] = text.strip()
    return queries


class Judgment(NamedTuple):
    """Judgment of a video for a query.

    Attributes:
        query_id: Id of the query.
        video: Id of the video.
        grade: Grade from 0 to 3.
        location: Line, for messages.
        fields: Other fields of the line, such as `video_language`.
    """

    query_id: str
    video: str
    grade: int
    location: str
    fields: dict[str, Any]


def list_judgments(uri: str, field: str) -> Iterator[Judgment]:
    """Yields the judgments of JSON lines with `query_id`, `doc_id` and `relevance`.

    `uri` is a file, a folder or a glob of .jsonl or .jsonl.gz files.

    Raises:
        SpecError: For `field`: a file is missing or malformed.
    """
    rule = 'a line {"query_id": "...", "doc_id": "...", "relevance": an integer from 0 to 3}'
    try:
        for file in list_files(uri, LINES):
            for line in read_rows(file):
                fields = dict(line.fields)
                ids = [fields.pop(name, None) for name in ("query_id", "doc_id")]
                grade = fields.pop("relevance", None)
                is_grade = isinstance(grade, int | float) and not isinstance(grade, bool)
                if not is_grade or grade not in range(MAX_GRADE + 1) or not all(map(_is_id, ids)):
                    raise SpecError("path", line.fields, rule, note=f" ({line.location})")
                yield Judgment(str(ids[0]), str(ids[1]), int(grade), line.location, fields)
    except SpecError as error:
        raise error.at(field) from None


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


@dataclass(frozen=True)
class Judgments:
    """Relevance judgments of MultiVENT 2.0.

    Attributes:
        qrels: Grades from 0 to 3 by video id, by query id.
        values: Values of the other fields, such as `video_language`, by (query id, video id), by
            field. Empty values are left out.
    """

    qrels: dict[str, dict[str, int]] = field(default_factory=dict)
    values: dict[str, dict[tuple[str, str], str]] = field(default_factory=dict)


def read_judgments(uri: str, field: str) -> Judgments:
    """Reads all judgments, see `list_judgments`.

    Raises:
        SpecError: A file is missing, malformed or empty, or a video has two grades for a query.
    """
    judgments = Judgments()
    for query_id, video, grade, location, fields in list_judgments(uri, field):
        known = judgments.qrels.setdefault(query_id, {}).setdefault(video, grade)
        if known != grade:
            rule, problem = "the only grade of its video", f"differs from {known}"
            raise SpecError(field, grade, rule, problem, f" ({location})")
        for name, value in fields.items():
            if value not in (None, ""):
                judgments.values.setdefault(name, {})[query_id, video] = str(value)
    if not judgments.qrels:
        raise SpecError(field, uri, "a file with at least one judgment", "is empty")
    return judgments


class Items(SelectedVideos):
    """Videos of MultiVENT 2.0, whole or divided into windows, with their recognised text.

    `path` is a folder with the shards (`000001.tar`), or with the unpacked files at any depth. A
    video `<id>.mp4` may have `<id>.m4a`, which replaces its audio, and `<id>.json` with the title,
    the description and a caption. The id of an item is the id of the video, as in the judgments.

    **Text.** `asr` and `ocr` are the archives of the features as they are distributed (a folder,
    .zip, .tar.gz, possibly nested; see the recogniser `precomputed`). The text of an item consists
    of the parts in `text`, separated by empty lines, so that indexes of text need not decode
    videos. A window has the text of its time, and parts without times belong to the first window.
    An unreadable file or member of the archives is a reject, and so is an item without text if the
    encoder reads only texts.

    **Payload and metadata.** See `Video`. In addition: `description`, and `audio_file` for videos
    with a separate audio file.
    """

    class Spec(Video.Spec):
        """Options of the MultiVENT source."""

        name: Literal["multivent"] = "multivent"  # type: ignore[assignment]
        window_seconds: float | None = Field(None, ge=1, le=86_400)
        """Duration of a window, in seconds; None: an item is an entire video."""
        video_ids: Uri | None = None
        """CSV file with the videos to index in the column `id`, such as `multivent_2_ids.csv`; null
        for all. Lines that are not ids are ignored."""
        asr: Uri | None = None
        """Recognised speech, such as `whisper_asr.zip` or the folder of the archives of train."""
        ocr: Uri | None = None
        """Recognised text of frames, such as `paddle_ocr.zip`."""
        captions: Uri | None = None
        """Captions as JSON lines with `doc_id` and `text`, such as
        `Qwen3-Omni-30B-A3B-Instruct_captions.jsonl`; null for those of the `<id>.json` files."""
        text: tuple[TextPart, ...] = ("ocr", "asr")
        """Parts of the text of an item: title, description, caption, ocr, asr."""

    provides = ("item_id", "text", "frames", "audio")
    spec: Spec

    # -- listing -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `SpecError` if videos or feature archives are missing."""
        super().check()
        spec = self.spec
        for name, part in FEATURES.items():
            if getattr(spec, name) is not None:
                if part not in spec.text:
                    raise SpecError(name, getattr(spec, name), f"null unless {part} is in `text`")
                with within(name):
                    self._recognisers[part].unreadable()
            elif name == part in spec.text and "text" in spec.model_fields_set:
                raise MissingField(name, None, f"the archive of {part}, which is in `text`")
        _ = self.video_ids

    @functools.cached_property
    def video_ids(self) -> frozenset[str] | None:
        """Ids of the videos of the collection, or None for all."""
        return None if self.spec.video_ids is None else read_ids(self.spec.video_ids)

    @functools.cached_property
    def _recognisers(self) -> dict[str, _Features]:
        return {
            part: _Features(uri, is_speech=part == "asr")
            for name, part in FEATURES.items()
            if (uri := getattr(self.spec, name)) is not None
        }

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields the shards of the videos, and one for the unreadable files of each archive."""
        yield from super().shards()
        yield from ({"unreadable": part} for part in self._recognisers)

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the items of each video, or the unreadable files of an archive as rejects."""
        if "unreadable" not in shard:
            yield from super().scan(shard)
            return
        part = shard["unreadable"]
        for name, problem in self._recognisers[part].unreadable():
            error = Unreadable(f"corrupted {part}", problem)
            yield self.reject(f"{part}/{PurePosixPath(name).name}", "", error, "list")

    def list_files(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """Yields the videos of a shard with their other files."""
        for file in super().list_files(shard):
            if isinstance(file, MediaFile) and "archive" not in shard:
                file = self._with_siblings(file)
            yield file

    def _with_siblings(self, file: MediaFile) -> MediaFile:
        """Adds the audio and the metadata next to a video."""
        stem = file.path.removesuffix(PurePosixPath(file.path).suffix)
        fs, folder = self._folder
        sound, metadata = (posixpath.join(folder, stem + suffix) for suffix in (SOUND, METADATA))
        if fs.isfile(sound):
            location = [stem + SOUND, None, fs.size(sound), None]
            file = replace(file, annotation={**file.annotation, "audio_file": location})
        if fs.isfile(metadata) and fs.size(metadata) <= SIDECAR_BYTES:
            with open_file(fs, metadata) as stream:
                text = stream.read().decode("utf-8", "replace")
            file = replace(file, sidecars={METADATA: text})
        return file

    def _sample(self, archive: str, key: str, members: list[Member]) -> Iterator[MediaFile]:
        sounds = {PurePosixPath(m.name).stem: m for m in members if m.suffix == SOUND}
        for file in super()._sample(archive, key, members):
            if sound := sounds.get(PurePosixPath(file.id).name.removesuffix(file.suffix)):
                location = [archive, sound.offset, sound.size, sound.deflated]
                file = replace(file, annotation={**file.annotation, "audio_file": location})
            yield file

    def list_items(self, file: MediaFile, revision: str, path: str | None) -> Iterator[Item]:
        """Yields the windows of a video, or the video, with title and text."""
        info = read_metadata(file.sidecars.get(METADATA))
        metadata = {k: v for k, v in info.items() if k in ("title", "description", "caption") and v}
        if "audio_file" in file.annotation:
            metadata["audio_file"] = file.annotation["audio_file"]
        title = metadata.pop("title", None)
        for item in super().list_items(file, revision, path):
            text = self._text(item, info)
            yield replace(
                item,
                title=title,
                text=text or None,
                metadata={**(item.metadata or {}), **metadata},
                revision=make_revision([revision], text) if text else revision,
            )

    def _text(self, item: Item, info: dict[str, str]) -> str:
        parts = []
        is_first = item.span is None or item.span[1] == 0
        for part in self.spec.text:
            if part in self._recognisers:
                parts.append(self._recognisers[part].text(item))
            elif is_first:
                parts.append(info.get(part) or "")
        return "\n\n".join(filter(None, parts))

    def find_file(self, parent_id: str, metadata: dict[str, Any]) -> MediaFile:
        """Returns the video of an indexed item, with its audio file."""
        file = super().find_file(parent_id, metadata)
        if "audio_file" not in metadata:
            return file
        return replace(file, annotation={"audio_file": metadata["audio_file"]})

    # -- decoding ----------------------------------------------------------------------------

    def decode_file(
        self, file: MediaFile, path: str, items: Sequence[Item]
    ) -> Iterator[Item | Unreadable]:
        """Yields the requested windows. Audio is read from the audio file, if it can be read."""
        if not self.reads_files:  # the encoder reads the text
            missing = Unreadable("empty text", f"no {' or '.join(self.spec.text)}")
            yield from (item if item.text else missing for item in items)
            return
        videos = super().decode_file(file, path, items)
        location = file.annotation.get("audio_file")
        if location is None or "audio" not in self.payload.names:
            yield from videos
            return
        name, offset, size, deflated = location
        sound = MediaFile(file.id, name, size, offset, SOUND, deflated=deflated)
        try:
            with self._audio.local_path(sound) as sound_path:
                sounds = self._audio.decode_file(sound, sound_path, items)
                for video, item in zip(videos, sounds, strict=True):
                    yield self._merge(video, item)
        except OSError as error:
            raise Unreadable("unreadable", f"{name}: {error}") from None

    def _merge(self, video: Item | Unreadable, sound: Item | Unreadable) -> Item | Unreadable:
        """Replaces the audio of a decoded video."""
        if isinstance(sound, Unreadable):
            return video
        if isinstance(video, Unreadable):  # such as a video without an audio track
            return video if "frames" in self.payload.names else sound
        duration = (sound.metadata or {}).get("duration")
        metadata = {**(video.metadata or {}), "has_audio": True, "audio_duration": duration}
        payload = {**video.payload, "audio": sound.payload["audio"]}
        return replace(video, metadata=metadata, payload=payload)

    def _payload(self, name: str, window: dict[str, Any]) -> Any:
        return super()._payload(name, window) if name in ("frames", "audio") else None

    @functools.cached_property
    def _audio(self) -> Audio:
        fields = {name: getattr(self.spec, name) for name in Audio.Spec.model_fields}
        return Audio(Audio.Spec(**{**fields, "name": "audio"}), ("audio",))


class _Features:
    """Recognised text of videos in feature archives."""

    def __init__(self, uri: str, *, is_speech: bool):
        from pipeline.data.recognise import precomputed  # imports torch

        self._class: type[Precomputed]
        self._class = precomputed.PrecomputedSpeech if is_speech else precomputed.PrecomputedText
        self._spec = precomputed.Precomputed.Spec(path=uri)
        self._separator = " " if is_speech else "\n"

    @functools.cached_property
    def _recogniser(self) -> Precomputed:
        return self._class(self._spec, skip_unreadable=True)

    def unreadable(self) -> list[tuple[str, str]]:
        from pipeline.data.recognise.precomputed import unreadable_files

        return unreadable_files(self._spec, self._class.kind)

    def text(self, item: Item) -> str:
        return self._separator.join(line.text for line in self._recogniser.lines(item.row()))


class Queries(CollectionQueries["Queries.Spec"]):
    """Queries and graded judgments of MultiVENT 2.0, with the main metric nDCG@10.

    `path` is `multivent_2_train_queries.csv` or `multivent_2_test_queries.csv`, and `judgments` the
    JSON lines with `query_id`, `doc_id` and `relevance`. The videos are indexed with the source
    `multivent`. The official metrics are nDCG@10, R@10, R@100, R@1000, AP, RR and Judged@10, and
    require `k: 1000`.

    **Categories.** Query categories are the parts of the ids of the train set (language, category,
    style, channel) and the other fields of the judgments of the test set (`video_language`,
    `video_type`, `video_modality`, `query_event_type`).

    **Results.** For each row, `multivent/<row>.json` in the output folder is a submission in the
    format of `submission`, and `multivent/<row>_splits.json` contains the official metrics for
    each value of a field of the judgments: only judgments with the value are evaluated, after
    videos that are relevant under another value are removed from the ranking.
    """

    class Spec(QueriesSpec):
        """Options of the MultiVENT benchmark."""

        name: Literal["multivent"] = "multivent"
        path: Uri
        """CSV file with `Query_id` and `query`."""
        judgments: Uri
        """JSON lines of relevance judgments."""
        submission: Literal["multivent", "magmar"] = "multivent"
        """Format of the submissions: `{query id: {video id: score}}`, or that of the shared task
        MAGMaR 2026, `{query id: [{"video_id": ..., "relevance": score}]}`, best first."""

    measure = "nDCG@10"

    @functools.cached_property
    def _judgments(self) -> Judgments:
        return read_judgments(self.spec.judgments, "judgments")

    def queries(self) -> dict[str, str]:
        """Reads the queries."""
        return read_queries(self.spec.path)

    def judgments(self) -> dict[str, dict[str, int]]:
        """Reads the judgments."""
        return self._judgments.qrels

    def categories(self, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
        """Groups the queries by the parts of their ids, and by the fields of relevant videos."""
        fields: dict[str, dict[str, Any]] = {}
        for query_id in query_ids:
            parts = query_id.split("_")
            if len(parts) == NUM_ID_PARTS and parts[0] == "internvid":
                for name, value in zip(ID_PARTS, parts[1:-1], strict=True):
                    fields.setdefault(name, {})[query_id] = value
        qrels = self._judgments.qrels
        for name, values in self._judgments.values.items():
            found: dict[str, set[str]] = {}
            for (query_id, video), value in values.items():
                if qrels[query_id][video] > 0:
                    found.setdefault(query_id, set()).add(value)
            fields[name] = {query_id: sorted(group) for query_id, group in found.items()}
        return group_categories(fields, query_ids)

    def write_result(self, folder: str, row: BenchmarkRow) -> str:
        """Writes a row as a submission, and its scores per split."""
        root = posixpath.join(config.absolute(folder), "multivent")
        path = posixpath.join(root, f"{row.name}.json")
        write_submission(path, row.rankings, self.spec.submission)
        if splits := split_scores(row.rankings, self._judgments):
            text = json.dumps(splits, indent=1, ensure_ascii=False)
            write_atomic(posixpath.join(root, f"{row.name}_splits.json"), text)
        return path


def write_submission(
    uri: str, run: Run, form: Literal["multivent", "magmar"] = "multivent"
) -> None:
    """Writes a run as `{query id: {video id: score}}`, or in the format of MAGMaR."""
    with open_atomic(uri) as file:
        file.write("{")
        for number, (query_id, scores) in enumerate(run.items()):
            entry: Any = {video: float(score) for video, score in scores.items()}
            if form == "magmar":
                entry = [{"video_id": video, "relevance": entry[video]} for video in entry]
            file.write("," * (number > 0) + f"\n{json.dumps(query_id)}: {json.dumps(entry)}")
        file.write("\n}\n")


def split_scores(
    run: Run, judgments: Judgments, measures: Sequence[str] = MEASURES
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the mean of the official metrics by field of the judgments, by value and by metric.

    For a value, only queries and judgments with this value are evaluated. Videos that are relevant
    to the query under another value are removed from its ranking first.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, values in judgments.values.items():
        for value in sorted(set(values.values())):
            qrels: dict[str, dict[str, int]] = {}
            removed: dict[str, set[str]] = {}
            for query_id, grades in judgments.qrels.items():
                for video, grade in grades.items():
                    if values.get((query_id, video)) == value:
                        qrels.setdefault(query_id, {})[video] = grade
                    elif grade > 0:
                        removed.setdefault(query_id, set()).add(video)
            rest: dict[str, Mapping[str, float]] = {
                query_id: {
                    video: score
                    for video, score in run.get(query_id, {}).items()
                    if video not in removed.get(query_id, ())
                }
                for query_id in qrels
            }
            found.setdefault(name, {})[value] = means(per_query(rest, qrels, measures))
    return found


class QueryFiles(ValidationFiles):
    """Validation queries and judgments in the same format."""

    judgments: Uri
    """JSON lines of relevance judgments."""
    videos: Uri | None = None
    """Folder of the validation videos, or null for that of the training videos."""


class Rows(RowData["Rows.Spec"]):
    """Training data in the format of MultiVENT 2.0: queries in CSV, judgments in JSON lines.

    `path` has the columns `Query_id` and `query`. `judgments` has lines {"query_id", "doc_id",
    "relevance"}. A relevance above 0 means relevant. Queries without a relevant video are left out.
    The id of a document is its `doc_id`, and its file is `<doc_id>.mp4` in any folder or .tar
    archive below `videos`, such as the shards, which are not unpacked. If `<doc_id>.m4a` exists, it
    replaces the audio of the video.
    """

    class Spec(RowSpec):
        """Training data in MultiVENT's format."""

        name: Literal["multivent"] = "multivent"
        judgments: Uri
        """JSON lines of relevance judgments."""
        videos: Uri
        """Folder of the videos or of their archives."""
        validation: float | QueryFiles | None = None
        """Validation data: a fraction of the documents with their queries, or {path: ...,
        judgments: ..., videos: ...}, or null for none."""

    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads the judged queries of `path`."""
        assert isinstance(files, Rows.Spec | QueryFiles)
        queries = read_queries(files.path)
        pairs: dict[tuple[str, str], tuple[str, str, str]] = {}
        for query_id, video, grade, location, _ in list_judgments(files.judgments, "judgments"):
            if grade > 0 and query_id not in queries:
                rule = f"the id of a query of {files.path}"
                raise SpecError("judgments", query_id, rule, note=f" ({location})")
            if grade > 0:
                pairs.setdefault((query_id, video), (queries[query_id], video, location))
        listing = list_videos(files.videos or self.spec.videos, pairs.values())
        if not pairs:
            rule = "a file with at least one relevance above 0"
            raise SpecError("judgments", files.judgments, rule, "contains no such relevance")
        num_judged = len({query_id for query_id, _ in pairs})
        if num_judged < len(queries):
            message = "%d of %d queries of %s are left out: they have no relevant video"
            warn(message, len(queries) - num_judged, len(queries), files.path)
        return listing
