"""The source of the videos of MSR-VTT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field, PositiveInt

from pipeline.config import SpecError, Uri
from pipeline.schema import Reject
from pipeline.sources.annotations import read_csv, read_json
from pipeline.sources.completeness import MissingFiles, check_files, check_number
from pipeline.sources.media import MediaFile
from pipeline.sources.video import Video


class Msrvtt(Video):
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

    def check(self) -> None:
        """Raises `SpecError` if videos of the split are missing."""
        super().check()
        check_number("num_documents", self.spec.num_documents, len(self._ids), "videos")
        if self.spec.missing == "error":
            found = (
                file.id
                for shard in super().shards()
                for file in self.list_files(shard)
                if isinstance(file, MediaFile)
            )
            names = {video: f"{video}.mp4" for video in self._ids}
            check_files("path", self.spec.path, names, found)

    @property
    def _ids(self) -> frozenset[str]:
        if not hasattr(self, "_wanted"):
            rows = read_csv(self.spec.video_ids, ("video_id",), "video_ids")
            self._wanted = frozenset(row["video_id"] for _, row in rows)
        return self._wanted

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the decoded content. The selection does not."""
        excluded = ("video_ids", "num_documents", "missing")
        return {name: v for name, v in super().settings().items() if name not in excluded}

    def list_files(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """Yields the videos of a shard that belong to the split."""
        for file in super().list_files(shard):
            if isinstance(file, Reject):
                yield file
                continue
            video = PurePosixPath(file.id).name.removesuffix(file.suffix)
            if video in self._ids:
                yield replace(file, id=video)


def read_msrvtt(uri: str) -> tuple[dict[str, str], list[tuple[str, str, Any]]]:
    """Reads MSR-VTT's JSON file.

    Returns:
        Split of each video; and location, video id and unchecked text of each sentence.
    """
    value = read_json(uri, "path")
    rule = "MSR-VTT's {videos: [{video_id, split}], sentences: [{video_id, caption}]}"
    fields = value if isinstance(value, dict) else {}
    videos, captions = fields.get("videos"), fields.get("sentences")
    if not isinstance(videos, list) or not isinstance(captions, list):
        raise SpecError("path", uri, rule, "has another format")
    splits: dict[str, str] = {}
    for number, video in enumerate(videos):
        location = f"video {number} of {uri}"
        video_id = video.get("video_id") if isinstance(video, dict) else video
        if not isinstance(video_id, str) or not video_id or not isinstance(video, dict):
            raise SpecError("path", video_id, rule, note=f" ({location})")
        splits[video_id] = str(video.get("split", ""))
    sentences = []
    for number, sentence in enumerate(captions):
        location = f"sentence {number} of {uri}"
        if not isinstance(sentence, dict):
            raise SpecError("path", sentence, rule, note=f" ({location})")
        video_id = sentence.get("video_id")
        if not isinstance(video_id, str) or video_id not in splits:
            raise SpecError("path", video_id, "the video_id of a video", note=f" ({location})")
        sentences.append((location, video_id, sentence.get("caption")))
    return splits, sentences
