"""The benchmark MultiVENT 2.0: event-centric video retrieval."""

from __future__ import annotations

import functools
import json
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline import config
from pipeline.atomic import open_atomic, write_atomic
from pipeline.config import SpecError, Uri, within
from pipeline.eval import Benchmark, BenchmarkRow, JudgedQueries
from pipeline.eval.datasets import DatasetSpec, check_texts, judged_queries
from pipeline.eval.metrics import Run, means, per_query
from pipeline.eval.topics import group_categories, parse_row, read_lines
from pipeline.sources.annotations import read_csv

#: Official metrics. Unjudged videos are not relevant, and the gain of a grade is the grade.
MEASURES = ("nDCG@10", "R@10", "R@100", "R@1000", "AP", "RR", "Judged@10")
#: Parts of the query ids of the train set, `internvid_<language>_..._<channel>_<number>`.
ID_PARTS = ("language", "category", "style", "channel")
#: Number of parts of such an id, including the prefix and the number.
NUM_ID_PARTS = 6
MAX_GRADE = 3


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


class Multivent(Benchmark["Multivent.Spec"]):
    """Queries and graded judgments of MultiVENT 2.0, with the main metric nDCG@10.

    `path` is `multivent_2_train_queries.csv` or `multivent_2_test_queries.csv`, and `judgments` the
    JSON lines with `query_id`, `doc_id` and `relevance`. The videos are indexed with the source
    `multivent`. The official metrics are nDCG@10, R@10, R@100, R@1000, AP, RR and Judged@10, and
    require `k: 1000`.

    **Categories.** Query categories are the parts of the ids of the train set (language, category,
    style, channel) and the other fields of the judgments of the test set (`video_language`,
    `video_type`, `video_modality`, `query_event_type`).

    **Results.** For each row, `multivent/<row>.json` in the output folder is a submission, `{query
    id: {video id: score}}`, and `multivent/<row>_splits.json` contains the official metrics for
    each value of a field of the judgments: only judgments with the value are evaluated, after
    videos that are relevant under another value are removed from the ranking.
    """

    class Spec(DatasetSpec):
        """Options of the MultiVENT benchmark."""

        name: Literal["multivent"] = "multivent"
        path: Uri
        """CSV file with `Query_id` and `query`."""
        judgments: Uri
        """JSON lines of relevance judgments."""

    @functools.cached_property
    def _judgments(self) -> Judgments:
        return read_judgments(self.spec.judgments, "benchmark.judgments")

    def load(self) -> JudgedQueries:
        """Loads the queries and judgments."""
        with within("benchmark"):
            texts = read_queries(self.spec.path, "path")
        judgments = self._judgments
        check_texts(texts, texts, self.spec.path)
        fields: dict[str, dict[str, Any]] = {}
        for query_id in judgments.qrels:
            parts = query_id.split("_")
            if len(parts) == NUM_ID_PARTS and parts[0] == "internvid":
                for name, value in zip(ID_PARTS, parts[1:-1], strict=True):
                    fields.setdefault(name, {})[query_id] = value
        for name, values in judgments.values.items():
            found: dict[str, set[str]] = {}
            for (query_id, video), value in values.items():
                if judgments.qrels[query_id][video] > 0:
                    found.setdefault(query_id, set()).add(value)
            fields[name] = {query_id: sorted(group) for query_id, group in found.items()}
        judged = texts.keys() & judgments.qrels.keys()
        return judged_queries(
            self.spec,
            self.spec.path,
            texts,
            judgments.qrels,
            categories=group_categories(fields, judged),
            measure="nDCG@10",
        )

    def write_result(self, folder: str, row: BenchmarkRow) -> str:
        """Writes a row as a submission, and its scores per split."""
        root = posixpath.join(config.absolute(folder), "multivent")
        path = posixpath.join(root, f"{row.name}.json")
        write_submission(path, row.rankings)
        if splits := split_scores(row.rankings, self._judgments):
            text = json.dumps(splits, indent=1, ensure_ascii=False)
            write_atomic(posixpath.join(root, f"{row.name}_splits.json"), text)
        return path


def read_queries(uri: str, field: str) -> dict[str, str]:
    """Reads the queries by id.

    Args:
        uri: Path or URI of the CSV file.
        field: Spec field that errors name.

    Raises:
        SpecError: The file is missing or malformed, or an id occurs twice.
    """
    queries: dict[str, str] = {}
    for location, row in read_csv(uri, ("Query_id", "query"), field):
        if row["Query_id"] in queries:
            note = f" ({location})"
            raise SpecError(field, row["Query_id"], "a unique query id", "occurs twice", note)
        queries[row["Query_id"]] = row["query"].strip()
    return queries


def read_judgments(uri: str, field: str) -> Judgments:
    """Reads relevance judgments.

    Args:
        uri: Path or URI of the JSON lines.
        field: Spec field that errors name.

    Raises:
        SpecError: The file is missing or malformed, or a video has two grades for a query.
    """
    rule = 'a line {"query_id": "...", "doc_id": "...", "relevance": an integer from 0 to 3}'
    judgments = Judgments()
    for number, line in read_lines(uri, field):
        note = f" (line {number} of {uri})"
        row = parse_row(line, field, rule, note)
        try:
            query_id, video, grade = (row[k] for k in ("query_id", "doc_id", "relevance"))
        except KeyError:
            raise SpecError(field, line[:80], rule, note=note) from None
        is_id = isinstance(query_id, str) and isinstance(video, str | int) and video != ""
        is_grade = isinstance(grade, int | float) and not isinstance(grade, bool)
        if not is_id or not is_grade or not (math.isfinite(grade) and grade == int(grade)):
            raise SpecError(field, line[:80], rule, note=note)
        if not 0 <= grade <= MAX_GRADE:
            raise SpecError(field, line[:80], rule, note=note)
        grades = judgments.qrels.setdefault(query_id, {})
        if grades.setdefault(str(video), int(grade)) != int(grade):
            rule = "the only grade of its video"
            raise SpecError(field, line[:80], rule, "differs from another", note)
        for name, value in row.items():
            if name not in ("query_id", "doc_id", "relevance") and value not in (None, ""):
                judgments.values.setdefault(name, {})[query_id, str(video)] = str(value)
    if not judgments.qrels:
        raise SpecError(field, uri, "a file with at least one judgment", "is empty")
    return judgments


def write_submission(uri: str, run: Run) -> None:
    """Writes a run as `{query id: {video id: score}}`."""
    with open_atomic(uri) as file:
        file.write("{")
        for number, (query_id, scores) in enumerate(run.items()):
            entry = json.dumps({video: float(score) for video, score in scores.items()})
            file.write("," * (number > 0) + f"\n{json.dumps(query_id)}: {entry}")
        file.write("\n}\n")


def split_scores(
    run: Run, judgments: Judgments, measures: Sequence[str] = MEASURES
) -> dict[str, dict[str, dict[str, float]]]:
    """Computes the official metrics for each value of the fields of the judgments.

    For a value, only judgments with this value are evaluated. Videos that are relevant to the query
    under another value are removed from its ranking first.

    Args:
        run: Scores by video id, by query id.
        judgments: The judgments.
        measures: Names of the metrics.

    Returns:
        Mean of each metric over the queries with judgments of the value, by value, by field.
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
