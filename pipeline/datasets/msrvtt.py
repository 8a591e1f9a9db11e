"""MSR-VTT: videos with 20 sentences each.

- `MSRVTT_data.json` has the splits of the videos and all sentences.
- `MSRVTT_JSFUSION_test.csv` has one sentence per video of the test set 1k-A.
- `MSRVTT_train.9k.csv` and `MSRVTT_train.7k.csv` have the ids of the training videos.
- The videos are `<video_id>.mp4`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, PositiveInt, model_validator

from pipeline.config import SpecError, Uri
from pipeline.data.media import MediaFile
from pipeline.data.video import Video
from pipeline.datasets.files import check_number, check_text, read_csv, read_json
from pipeline.datasets.items import MissingFiles, SelectedVideos, check_files
from pipeline.datasets.queries import CollectionQueries, QueriesSpec
from pipeline.datasets.rows import list_videos
from pipeline.train.data.row_data import RowData, RowSpec, ValidationFiles
from pipeline.train.data.rows import Listing


class Sentence(NamedTuple):
    """Sentence about a video.

    Attributes:
        key: `key` in a CSV file, or the number of the sentence in the JSON file.
        video: Id of the video.
        text: Unchecked text.
        location: Row or sentence, for messages.
    """

    key: str
    video: str
    text: Any
    location: str


class _Video(BaseModel):
    video_id: str = Field(min_length=1)
    split: str = ""


class _Caption(BaseModel):
    video_id: str
    caption: Any = None


class _Data(BaseModel):
    videos: list[_Video]
    sentences: list[_Caption]


def read_data(uri: str) -> tuple[dict[str, str], list[Sentence]]:
    """Reads `MSRVTT_data.json`: the split of each video, and all sentences."""
    rule = "MSR-VTT's {videos: [{video_id, split}], sentences: [{video_id, caption}]}"
    data: _Data = read_json(uri, "path", _Data, rule)
    splits = {video.video_id: video.split for video in data.videos}
    sentences = []
    for number, sentence in enumerate(data.sentences):
        location = f"sentence {number} of {uri}"
        if (video_id := sentence.video_id) not in splits:
            raise SpecError("path", video_id, "the video_id of a video", note=f" ({location})")
        sentences.append(Sentence(str(number), video_id, sentence.caption, location))
    return splits, sentences


def read_test(uri: str, key: str = "key") -> Iterator[Sentence]:
    """Yields the rows of `MSRVTT_JSFUSION_test.csv`, whose query ids are in the column `key`."""
    for location, row in read_csv(uri, (key, "video_id", "sentence"), "path"):
        yield Sentence(row[key], row["video_id"], row["sentence"], location)


def read_ids(uri: str, field: str) -> dict[str, str]:
    """Returns the locations of the `video_id` of a CSV file, by id."""
    return {row["video_id"]: location for location, row in read_csv(uri, ("video_id",), field)}


class Items(SelectedVideos):
    """Videos of a split of MSR-VTT, one item each.

    `path` is a folder with the videos, or with ZIP or tar archives of them. `video_ids` is the file
    of the split, such as `MSRVTT_JSFUSION_test.csv` (1k-A test) or `MSRVTT_train.9k.csv`. The id of
    an item is its `video_id`, which is the name of the file without its suffix. Other videos are
    not listed. See `Video` for frames, audio and metadata.
    """

    class Spec(Video.Spec):
        """Options of the MSR-VTT source."""

        name: Literal["msrvtt"] = "msrvtt"  # type: ignore[assignment]
        video_ids: Uri
        """CSV file with the column `video_id`."""
        window_seconds: float | None = Field(None, ge=1, le=86_400)
        """Duration of a window, in seconds; None: an item is an entire video."""
        num_documents: PositiveInt | None = None
        """Expected number of videos, such as 1000; another number is an error. Null to accept any.
        """
        missing: MissingFiles = "error"
        """Treatment of videos that are not in `path`: an `error`, or `skip` to index the others."""

    spec: Spec

    @functools.cached_property
    def video_ids(self) -> frozenset[str]:
        """Ids of the videos of the split."""
        return frozenset(read_ids(self.spec.video_ids, "video_ids"))

    def check(self) -> None:
        """Raises `SpecError` if videos of the split are missing."""
        super().check()
        check_number("num_documents", self.spec.num_documents, len(self.video_ids), "videos")
        if self.spec.missing == "error":
            files = (file for shard in self.shards() for file in self.list_files(shard))
            found = (file.id for file in files if isinstance(file, MediaFile))
            names = {video: f"{video}.mp4" for video in self.video_ids}
            check_files("path", self.spec.path, names, found)


class Queries(CollectionQueries["Queries.Spec"]):
    """Sentences as queries and their videos as relevant documents, with the main metric R@1.

    `path` is `MSRVTT_JSFUSION_test.csv` (1k-A: `key`, `video_id`, `sentence`), or
    `MSRVTT_data.json` with all sentences of the videos in `video_ids`. Query ids are the `key`, or
    the number of the sentence in the JSON file, from 0. Each query has one relevant video. The
    documents are indexed with the source `msrvtt`.
    """

    class Spec(QueriesSpec):
        """Options of the MSR-VTT benchmark."""

        name: Literal["msrvtt"] = "msrvtt"
        path: Uri
        """CSV file with `key`, `video_id` and `sentence`, or `MSRVTT_data.json`."""
        video_ids: Uri | None = None
        """CSV file with the videos of the split as `video_id`, for a JSON file; null for all."""

    measure = "R@1"

    @functools.cached_property
    def _sentences(self) -> list[Sentence]:
        spec = self.spec
        if spec.path.lower().endswith(".csv"):
            return list(read_test(spec.path))
        _, sentences = read_data(spec.path)
        if spec.video_ids is None:
            return sentences
        ids = read_ids(spec.video_ids, "video_ids")
        return [sentence for sentence in sentences if sentence.video in ids]

    def queries(self) -> dict[str, str]:
        """Returns the sentences."""
        return {s.key: check_text(s.text, "path", s.location).strip() for s in self._sentences}

    def judgments(self) -> dict[str, dict[str, int]]:
        """Returns the video of each sentence."""
        return {sentence.key: {sentence.video: 1} for sentence in self._sentences}


class Rows(RowData["Rows.Spec"]):
    """Training data in the format of MSR-VTT: videos as documents, their sentences as queries.

    `path` is `MSRVTT_data.json`. `validation.path` is a file in the format of
    `MSRVTT_JSFUSION_test.csv`, with the columns `video_id` and `sentence`. The id of a document is
    its `video_id`, and its file is `<video_id>.mp4` in any folder below `videos`. All videos with
    the same sentence are relevant to it.
    """

    class Spec(RowSpec):
        """Training data in MSR-VTT's format."""

        name: Literal["msrvtt"] = "msrvtt"
        videos: Uri
        """Folder of the videos."""
        ids: Uri | None = None
        """CSV file with the training videos as `video_id`, such as `MSRVTT_train.9k.csv`. Null to
        use `splits`."""
        splits: list[str] | None = None
        """Splits of the videos to train on, such as [train]. Null to use `ids`."""

        @model_validator(mode="after")
        def _check_selection(self) -> Self:
            rule = "a file of ids such as MSRVTT_train.9k.csv, or null when splits is set"
            self.require((self.ids is None) != (self.splits is None), "ids", rule)
            return self

    def rows(self, files: RowSpec | ValidationFiles) -> Listing:
        """Reads the sentences of `ids` or `splits`, or those of `validation.path`."""
        is_validation = isinstance(files, ValidationFiles)
        sentences = read_test(files.path, "video_id") if is_validation else self._selected()
        rows = (
            (check_text(s.text, "path", s.location).strip(), s.video, s.location) for s in sentences
        )
        listing = list_videos(self.spec.videos, rows)
        if not listing.rows:
            rule = "a file with at least one sentence"
            raise SpecError("path", files.path, rule, "has no sentences")
        return listing

    def _selected(self) -> Iterator[Sentence]:
        """Yields the sentences about the videos of `ids` or `splits`."""
        spec = self.spec
        splits, sentences = read_data(spec.path)
        if spec.ids is not None:
            wanted = read_ids(spec.ids, "ids")
            for video, location in wanted.items():
                if video not in splits:
                    rule = f"the id of a video of {spec.path}"
                    raise SpecError("ids", video, rule, note=f" ({location})")
            yield from (sentence for sentence in sentences if sentence.video in wanted)
            return
        names = sorted(set(splits.values()))
        for split in spec.splits or ():
            if split not in names:
                problem = f"is not a split of {spec.path}"
                raise SpecError.unknown_name("splits", split, names, problem)
        yield from (s for s in sentences if splits[s.video] in (spec.splits or ()))
