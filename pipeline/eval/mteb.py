"""Benchmarks that are retrieval tasks of mteb."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline import config
from pipeline.config import SpecError, within
from pipeline.decoding import Unreadable
from pipeline.eval import Benchmark, BenchmarkRow, JudgedQueries
from pipeline.eval.topics import group_categories
from pipeline.schema import is_blank
from pipeline.sources.manifests import to_json_value
from pipeline.sources.mteb_tasks import (
    MODALITIES,
    Task,
    TaskData,
    TaskSpec,
    file_content,
    load,
    query_text,
)

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta
    from mteb.results import TaskResult

#: Names of the scores of mteb without their cutoff, with their names in ir-measures.
MEASURES = {
    "ndcg": "nDCG",
    "map": "AP",
    "recall": "R",
    "precision": "P",
    "mrr": "RR",
    "hit_rate": "Success",
}
#: Number of documents per query that mteb evaluates.
NUM_DOCUMENTS = 1000


class Mteb(Benchmark["Mteb.Spec"]):
    """Queries and judgments of a retrieval task of mteb.

    **Queries.** Texts, images, or both, which the encoder must support. The instruction of a single
    query is appended to its text, as in mteb. The instruction of the task replaces that of the
    encoder's query template; encoders whose template has none ignore it. Queries with an empty
    text are left out.

    **Judgments.** All grades are preserved. Queries without judgments are left out.

    **Pools.** If the task contains the documents to rank for each query (`top_ranked`), rows rank
    only these. A reranker reranks the best of them.

    **Metrics.** The main score of the task is computed in addition to the metrics of the spec. The
    scores of all rows are also written in mteb's format, as computed by mteb, to
    `mteb/<model>/<encoder>/<task>.json` in the output folder. They contain the cutoffs up to `k`.
    """

    class Spec(TaskSpec):
        """Options of the mteb benchmark."""

        name: Literal["mteb"] = "mteb"
        instruction: Literal["task", "none"] = "task"
        """Instruction in the query template: that of the `task`, or `none` for the encoder's."""
        results: config.Uri | None = None
        """Local folder of the results in mteb's format, or null for `mteb` in the output folder.
        Results of other subsets and splits of the task in the folder are kept."""

    @functools.cached_property
    def _task(self) -> Task:
        return Task(self.spec)

    def load(self) -> JudgedQueries:
        """Loads the queries and judgments with mteb."""
        with within("benchmark"):
            task, data = self._task, load(self.spec)
            texts, images = _queries(task, data)
        if not texts:
            rule = "a task with a judged query"
            raise SpecError("benchmark.task", self.spec.task, rule, "has no judged queries")
        pools = data.top_ranked
        return JudgedQueries(
            texts,
            {query_id: data.qrels[query_id] for query_id in texts},
            num_unjudged=0,  # mteb removes them
            num_without_text=len(data.qrels) - len(texts),
            categories=_categories(data, set(texts)),
            images=images,
            pools=pools and {query_id: pools.get(query_id, []) for query_id in texts},
            instruction=task.instruction if self.spec.instruction == "task" else None,
            measure=measure_name(task.mteb.metadata.main_score),
            ignore_query_id=task.mteb.ignore_identical_ids,
            skip_first=task.mteb.skip_first_result,
        )

    def write_result(self, folder: str, row: BenchmarkRow) -> str:
        """Writes the scores of a row as `TaskResult` of mteb."""
        task = self._task
        result = task_result(task, row)
        meta = model_meta(row.name, row.fingerprint or "none")
        root = Path(self.spec.results or Path(config.absolute(folder)) / "mteb")
        parent = root / str(meta.name).replace("/", "__") / str(meta.revision)
        parent.mkdir(parents=True, exist_ok=True)
        file = parent / f"{result.task_name}.json"
        if file.exists():
            from mteb.results import TaskResult

            previous = TaskResult.from_disk(file)
            _remove(previous, task)
            result = previous.merge(result) if previous.scores else result
        result.to_disk(file)
        metadata = json.dumps(meta.to_dict(), indent=2, default=str)
        (parent / "model_meta.json").write_text(metadata, encoding="utf-8")
        return str(file)


def measure_name(score: str) -> str | None:
    """Returns the ir-measures name of a score of mteb, or None if only mteb computes it.

    >>> measure_name("ndcg_at_5"), measure_name("hit_rate_at_1"), measure_name("p-MRR")
    ('nDCG@5', 'Success@1', None)
    """
    if score == "accuracy":
        return "R@1"
    name, _, cutoff = score.rpartition("_at_")
    return f"{MEASURES[name]}@{cutoff}" if name in MEASURES else None


def model_meta(name: str, revision: str) -> ModelMeta:
    """Returns the metadata of a model with which mteb stores results.

    Args:
        name: Name of the model, without its organisation.
        revision: Revision of the model.
    """
    from mteb.models.model_meta import ModelMeta

    overwrites = {"name": f"maxray/{name}", "revision": revision}
    return ModelMeta.create_empty(overwrites=overwrites)


def task_result(task: Task, row: BenchmarkRow) -> TaskResult:
    """Evaluates the rankings of a row with mteb.

    Scores that depend on more than `row.k` documents per query are removed, unless the corpus has
    no more documents.

    Args:
        task: Task, whose data are loaded if necessary.
        row: Rankings of the row.
    """
    from mteb.results import TaskResult

    task.load()
    task.mteb.skip_first_result = False  # the rankings lack these documents
    scores: Any = task.mteb.evaluate(
        _Rankings(row), task.split, subsets_to_run=[task.subset], encode_kwargs={}
    )
    dataset: Any = task.mteb.dataset
    num_documents = len(dataset[task.subset][task.split]["corpus"])
    if row.k < min(num_documents, NUM_DOCUMENTS):
        scores = {
            subset: {name: v for name, v in values.items() if _cutoff(name) <= row.k}
            for subset, values in scores.items()
        }
    return TaskResult.from_task_results(task.mteb, {task.split: scores}, row.seconds)


class _Rankings:
    """Search model of mteb that returns given rankings."""

    def __init__(self, row: BenchmarkRow):
        self._rankings = row.rankings
        self.mteb_model_meta = model_meta(row.name, row.fingerprint or "none")

    def index(self, corpus: Any, **options: Any) -> None:
        """Does nothing."""

    def search(self, queries: Any, **options: Any) -> dict[str, dict[str, float]]:
        """Returns the rankings."""
        return {query_id: dict(scores) for query_id, scores in self._rankings.items()}


def _cutoff(score: str) -> float:
    """Returns the number of documents per query on which a score of mteb depends.

    >>> _cutoff("recall_at_100"), _cutoff("main_score"), _cutoff("nauc_ndcg_at_1_max")
    (100, 0, inf)
    """
    if score.startswith("nauc_"):  # from the scores of all documents
        return float("inf")
    match = re.search(r"_at_(\d+)$", score)
    return int(match[1]) if match else 0


def _remove(result: TaskResult, task: Task) -> None:
    """Removes the scores of the subset and the split of a task from a result."""
    others = [s for s in result.scores.get(task.split, []) if s["hf_subset"] != task.subset]
    scores = {**result.scores, task.split: others}
    result.scores = {split: values for split, values in scores.items() if values}


# -- queries -----------------------------------------------------------------------------------


def _queries(task: Task, data: TaskData) -> tuple[dict[str, str], dict[str, bytes] | None]:
    """Returns the texts and the images of the queries, by id.

    Raises:
        SpecError: The queries contain audio or videos, or an image is missing.
    """
    name, modalities = task.spec.task, task.query_modalities
    rule = "a task whose queries are texts, images, or both"
    if not set(modalities) <= {"text", "image"}:
        raise SpecError("task", name, rule, f"has queries of {' and '.join(modalities)}")
    texts: dict[str, str] = {}
    images: dict[str, bytes] = {}
    for row in data.queries:
        query_id = str(row["id"])
        text = query_text(row) if "text" in modalities else ""
        if "text" in modalities and is_blank(text):
            continue  # some tasks have empty queries
        texts[query_id] = text
        if "image" in modalities:
            try:
                image = file_content(row.get("image"), "image")
            except (Unreadable, OSError) as error:
                problem = f"has an unreadable image for the query {query_id!r} ({error})"
                raise SpecError("task", name, rule, problem) from None
            if image is None:
                raise SpecError("task", name, rule, f"has no image for the query {query_id!r}")
            images[query_id] = image
    return texts, images or None


def _categories(data: TaskData, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
    """Groups the queries by columns such as their language."""
    excluded = {"id", "title", "instruction", "modality", *MODALITIES}
    names = [name for name in data.queries.column_names if name not in excluded]
    columns = data.queries.select_columns(["id", *names])
    fields: dict[str, dict[str, Any]] = {}
    for row in columns:
        values: Mapping[str, Any] = to_json_value({name: row[name] for name in names})
        for name, value in values.items():
            fields.setdefault(name, {})[str(row["id"])] = value
    return group_categories(fields, query_ids)
