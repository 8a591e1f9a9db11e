"""Moment retrieval: QVHighlights, and Charades-STA and TVR in the format of Moment-DETR's code."""

from __future__ import annotations

import functools
import json
import math
import posixpath
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from pipeline import config
from pipeline.config import SpecError, Uri
from pipeline.datasets.files import check_text
from pipeline.datasets.queries import CollectionQueries, QueriesSpec
from pipeline.eval import BenchmarkRow
from pipeline.eval.metrics import means, per_query
from pipeline.eval.moments import Moments, Range
from pipeline.eval.topics import parse_row, read_lines
from pipeline.runtime.atomic import write_atomic

#: Prediction of a query whose video is not in the index. The official evaluation requires one.
NO_WINDOW = [0.0, 0.0, 0.0]
#: Official metrics.
MEASURES = ("mAP", "mAP@0.5", "mAP@0.75", "R1@0.5", "R1@0.7")
#: Ranges of the durations of moments (above, up to), in seconds.
LENGTHS = {"full": (0, math.inf), "short": (0, 10), "middle": (10, 30), "long": (30, 150)}
RULE = 'a line {"qid": 1, "query": "...", "vid": "...", "relevant_windows": [[0, 2.5], ...]}'


class _Query(NamedTuple):
    """Query with its original id, which can be a number."""

    id: Any
    text: str
    video: str
    ranges: list[Range] | None


class Queries(CollectionQueries["Queries.Spec"]):
    """Queries for time ranges of videos, with the main metric mAP over IoUs of 0.5 to 0.95.

    `path` has JSON lines with `qid`, `query`, `vid` and `relevant_windows`, such as
    `highlight_val_release.jsonl` of QVHighlights. Files without `relevant_windows`, such as that of
    the test split, are ranked for a submission. The videos `<vid>.mp4` are indexed as windows, see
    the source `video`. The official metrics are mAP, mAP@0.5, mAP@0.75, R1@0.5 and R1@0.7. In other
    metrics, windows with an IoU of at least 0.5 are relevant.

    **Results.** For each row, `moments/<row>.jsonl` in the output folder is a submission with the
    ranked windows, and `moments/<row>_metrics.json` has the official metrics for all moments and
    for short (up to 10 s), middle (up to 30 s) and long (up to 150 s) ones.
    """

    class Spec(QueriesSpec):
        """Options of the moment retrieval benchmark."""

        name: Literal["moments"] = "moments"
        path: Uri
        """JSON lines of the queries."""
        ranked: Literal["video", "corpus"] = "video"
        """Windows that a query ranks: those of its `video`, as in the official evaluation, or of
        all videos of the index (`corpus`), without a submission."""

    measure = "mAP"

    @functools.cached_property
    def _queries(self) -> dict[str, _Query]:
        queries: dict[str, _Query] = {}
        for number, line in read_lines(self.spec.path, "path", "query"):
            note = f" (line {number} of {self.spec.path})"
            row = parse_row(line, "path", RULE, note)
            query_id, video = row.get("qid"), row.get("vid")
            text = check_text(row.get("query"), "path", note[2:-1])
            if not isinstance(query_id, int | str) or not isinstance(video, str):
                raise SpecError("path", line[:80], RULE, note=note)
            if str(query_id) in queries:
                raise SpecError("path", query_id, "a unique qid", "occurs twice", note)
            ranges = _ranges(row.get("relevant_windows"), line, note)
            queries[str(query_id)] = _Query(query_id, text, video, ranges)
        return queries

    def queries(self) -> dict[str, str]:
        """Returns the texts of the queries."""
        return {query_id: query.text for query_id, query in self._queries.items()}

    def judgments(self) -> dict[str, dict[str, int]]:
        """Returns no grades: they depend on the windows of the index, see `Moments.qrels`."""
        has_ranges = any(query.ranges for query in self._queries.values())
        return {i: {} for i, query in self._queries.items() if query.ranges or not has_ranges}

    def options(self) -> dict[str, Any]:
        """Returns the moments."""
        return {"moments": self._moments(0, math.inf)}

    def _moments(self, above: float, up_to: float) -> Moments:
        ranges = {
            query_id: [r for r in query.ranges or () if above < r[1] - r[0] <= up_to]
            for query_id, query in self._queries.items()
        }
        videos = {query_id: query.video for query_id, query in self._queries.items()}
        return Moments(videos, ranges, self.spec.ranked == "video")

    def write_result(self, folder: str, row: BenchmarkRow) -> str | None:
        """Writes a submission and the official metrics. Returns the path of the submission."""
        name = posixpath.join(config.absolute(folder), "moments", row.name)
        metrics = {}
        for length, limits in LENGTHS.items():
            moments = self._moments(*limits)
            if known := [i for i in row.rankings if moments.ranges[i]]:
                run = {query_id: row.rankings[query_id] for query_id in known}
                qrels: dict[str, dict[str, int]] = {query_id: {} for query_id in known}
                values = per_query(run, qrels, MEASURES, replace(moments, spans=row.spans))
                metrics[length] = {"queries": len(known), **means(values)}
        write_atomic(f"{name}_metrics.json", json.dumps(metrics, indent=1))
        if self.spec.ranked == "corpus":
            return None
        lines = []
        for query_id, scores in row.rankings.items():
            query = self._queries[query_id]
            spans = [(row.spans[item_id], score) for item_id, score in scores.items()]
            windows = [[span.start, span.end, score] for span, score in spans] or [NO_WINDOW]
            fields = {"qid": query.id, "query": query.text, "vid": query.video}
            lines.append(json.dumps({**fields, "pred_relevant_windows": windows}) + "\n")
        write_atomic(f"{name}.jsonl", "".join(lines))
        return f"{name}.jsonl"


def _ranges(value: Any, line: str, note: str) -> list[Range] | None:
    if value is None:
        return None
    problem = SpecError("path", line[:80], RULE, "has invalid relevant_windows", note)
    if not isinstance(value, list):
        raise problem
    ranges: list[Range] = []
    for row in value:
        is_pair = isinstance(row, list) and len(row) == 2
        if not is_pair or not all(type(x) in (int, float) and math.isfinite(x) for x in row):
            raise problem
        start, end = row
        if not 0 <= start < end:
            raise problem
        ranges.append((float(start), float(end)))
    return ranges
