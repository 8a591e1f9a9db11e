"""Bases of the sources of published collections."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from pipeline.schema import Reject
from pipeline.sources.media import MediaFile
from pipeline.sources.video import Video


class SelectedVideos(Video):
    """Base class of sources of some of the videos below a folder.

    The id of a video is the name of its file without folder and suffix.
    """

    @functools.cached_property
    def video_ids(self) -> frozenset[str] | None:
        """Ids of the videos to list, or None for all."""
        return None

    def list_files(self, shard: dict[str, Any]) -> Iterator[MediaFile | Reject]:
        """Yields the selected videos of a shard, and unreadable archives as rejects."""
        for file in super().list_files(shard):
            if isinstance(file, Reject):
                yield file
                continue
            video = PurePosixPath(file.id).name.removesuffix(file.suffix)
            if self.video_ids is None or video in self.video_ids:
                yield replace(file, id=video)
