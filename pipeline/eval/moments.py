"""Moments: time ranges of videos that are relevant for queries (QVHighlights, Lei et al., 2021).

The items of an index are ranges of its videos. They are compared with the moments of a query by the
intersection over union of two ranges (IoU), which is 0 for ranges of different videos.

- `Rn@t`, such as R1@0.7: 1 if one of the first n items has an IoU of at least t with a moment.
- `mAP@t`: interpolated average precision of the first ten items. An item is relevant if its IoU
  with a moment is at least t. It is matched to the moment with the highest IoU that no better item
  has, and it is not relevant if there is none.
- `mAP`: mean of `mAP@t` for t = 0.5, 0.55, ..., 0.95.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.config import SpecError

if TYPE_CHECKING:
    from pipeline.index.reader import IndexReader

#: Thresholds whose mean is mAP.
THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
#: Number of ranked items that average precision takes into account.
AP_DEPTH = 10
#: Smallest IoU of an item that is a relevant document in metrics other than those of moments.
RELEVANT_IOU = 0.5
_MEASURE = re.compile(r"(?P<kind>R[1-9]\d*|mAP)@(?P<iou>0\.\d+|1(\.0)?)|mAP")

#: Start and end, in seconds.
Range = tuple[float, float]


class Span(NamedTuple):
    """Range of a video."""

    video: str
    start: float
    end: float


#: Span of items of videos without queries.
NO_SPAN = Span("", 0.0, 0.0)


class MomentMeasure(NamedTuple):
    """Metric of ranked ranges.

    Attributes:
        depth: Number of ranked items that it takes into account.
        thresholds: IoUs over whose values it is the mean.
        is_recall: Whether it is a recall instead of an average precision.
    """

    depth: int
    thresholds: tuple[float, ...]
    is_recall: bool

    @property
    def description(self) -> str:
        """Description for reports."""
        limits = dict.fromkeys((self.thresholds[0], self.thresholds[-1]))
        iou = " to ".join(f"{limit:g}" for limit in limits)
        if self.is_recall:
            return f"1 if one of the first {self.depth} results has an IoU of {iou} with a moment"
        return (
            f"interpolated average precision of the first {self.depth} results by an IoU of {iou}"
        )

    def value(self, spans: Sequence[Span], moments: Sequence[Span]) -> float:
        """Computes the metric of a query, whose ranked spans are given, best first."""
        ious = [[iou(span, moment) for moment in moments] for span in spans[: self.depth]]
        compute = _recall if self.is_recall else _average_precision
        return sum(compute(ious, each) for each in self.thresholds) / len(self.thresholds)


def moment_measure(name: str) -> MomentMeasure | None:
    """Returns the metric of a name, or None if it is not one of moments.

    >>> moment_measure("R1@0.7"), moment_measure("R@10")
    (MomentMeasure(depth=1, thresholds=(0.7,), is_recall=True), None)
    """
    if not (match := _MEASURE.fullmatch(name)):
        return None
    thresholds = (float(match["iou"]),) if match["iou"] else THRESHOLDS
    is_recall = name.startswith("R")
    return MomentMeasure(int(match["kind"][1:]) if is_recall else AP_DEPTH, thresholds, is_recall)


def iou(one: Span, two: Span) -> float:
    """Returns the intersection over union of two ranges.

    >>> iou(Span("v", 0, 10), Span("v", 5, 20)), iou(Span("v", 0, 10), Span("w", 0, 10))
    (0.25, 0.0)
    """
    intersection = min(one.end, two.end) - max(one.start, two.start)
    if one.video != two.video or intersection <= 0:
        return 0.0
    return intersection / (one.end - one.start + two.end - two.start - intersection)


def _recall(ious: Sequence[Sequence[float]], threshold: float) -> float:
    return float(any(value >= threshold for row in ious for value in row))


def _average_precision(ious: Sequence[Sequence[float]], threshold: float) -> float:
    matched: set[int] = set()
    precisions = []
    for rank, row in enumerate(ious, start=1):
        free = [i for i, value in enumerate(row) if value >= threshold and i not in matched]
        if free:
            matched.add(max(free, key=lambda i: row[i]))
            precisions.append(len(matched) / rank)
    best = [max(precisions[i:]) for i in range(len(precisions))]  # interpolated
    return sum(best) / len(ious[0]) if ious and ious[0] else 0.0


@dataclass(frozen=True)
class Moments:
    """Moments of the queries of a benchmark.

    Attributes:
        videos: Id of the video of each query.
        ranges: Relevant ranges of each query, empty if they are not known.
        are_in_video: Whether a query ranks the items of its video, or else of all videos.
        spans: Ranges of the items by id. Empty before `locate`.
    """

    videos: Mapping[str, str]
    ranges: Mapping[str, Sequence[Range]]
    are_in_video: bool = True
    spans: Mapping[str, Span] = field(default_factory=dict)

    def value(self, measure: MomentMeasure, query_id: str, item_ids: Iterable[str]) -> float:
        """Computes a metric of a query, given its ranked items."""
        spans = [self.spans.get(item_id, NO_SPAN) for item_id in item_ids]
        return measure.value(spans, self.moments(query_id))

    def moments(self, query_id: str) -> list[Span]:
        """Returns the moments of a query."""
        video = self.videos[query_id]
        return [Span(video, start, end) for start, end in self.ranges[query_id]]

    def locate(self, indexes: Iterable[IndexReader], filter: str | None) -> Moments:
        """Returns the moments with the ranges of the items of indexes.

        Raises:
            SpecError: The indexes have none of the videos, or no ranges of them.
        """
        wanted = set(self.videos.values())
        spans: dict[str, Span] = {}
        for index in indexes:
            for batch in index.batches(["item_id", "parent_id", "span"], filter=filter):
                spans |= _spans(batch.to_pylist(), wanted)
        if not spans:
            value = f"{len(wanted)} videos such as {min(wanted)}"
            rule = "videos whose time ranges the index has"
            raise SpecError("benchmark", value, rule, "are not in it")
        return replace(self, spans=spans)

    def pools(self) -> dict[str, tuple[str, ...]]:
        """Returns the items of the video of each query."""
        by_video: dict[str, list[str]] = {}
        for item_id, span in self.spans.items():
            by_video.setdefault(span.video, []).append(item_id)
        return {query: tuple(by_video.get(video, ())) for query, video in self.videos.items()}

    def qrels(self) -> dict[str, dict[str, int]]:
        """Returns the items of each query whose IoU with a moment is at least `RELEVANT_IOU`."""
        return {
            query_id: {
                item_id: 1
                for item_id in item_ids
                if any(iou(self.spans[item_id], m) >= RELEVANT_IOU for m in self.moments(query_id))
            }
            for query_id, item_ids in self.pools().items()
        }

    def notes(self) -> Iterator[str]:
        """Yields sentences about videos that are not in the index, and about their ranges."""
        counts = Counter(span.video for span in self.spans.values())
        videos = set(self.videos.values())
        if missing := len(videos - counts.keys()):
            yield f"{missing} of {len(videos)} videos are not in the index"
        if number := sum(not grades for grades in self.qrels().values()):
            yield f"{number} queries have no item with an IoU of at least {RELEVANT_IOU}"
        if not any(self.ranges.values()):
            yield "the moments are not known, so that all metrics are 0"


def video_id(parent_id: str) -> str:
    """Returns the id of the video of a file: its name without the suffix.

    >>> video_id("videos/NUsG9BgSes0_210.0_360.0.mp4")
    'NUsG9BgSes0_210.0_360.0'
    """
    return PurePosixPath(parent_id).stem


def _spans(rows: Iterable[Mapping[str, Any]], wanted: set[str]) -> dict[str, Span]:
    spans = {}
    for row in rows:
        names = PurePosixPath(row["parent_id"]).name, video_id(row["parent_id"])
        video = next((name for name in names if name in wanted), None)
        span = row["span"]
        if video and span and span["unit"] == "seconds":
            spans[row["item_id"]] = Span(video, span["start"], span["end"])
    return spans
