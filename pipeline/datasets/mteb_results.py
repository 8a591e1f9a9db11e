"""Results of rows in mteb's format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.eval import BenchmarkRow

if TYPE_CHECKING:
    from mteb.abstasks.retrieval import AbsTaskRetrieval
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


def write(task: AbsTaskRetrieval, subset: str, split: str, row: BenchmarkRow, folder: Path) -> str:
    """Writes the scores of a row as `TaskResult` and returns the path of the file.

    Scores of other subsets and splits of the task in the file are kept.
    """
    result = task_result(task, subset, split, row)
    meta = model_meta(row.name, row.fingerprint or "none")
    parent = folder / str(meta.name).replace("/", "__") / str(meta.revision)
    parent.mkdir(parents=True, exist_ok=True)
    file = parent / f"{result.task_name}.json"
    if file.exists():
        from mteb.results import TaskResult

        previous = TaskResult.from_disk(file)
        _remove(previous, subset, split)
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
    """Returns the metadata of a model with which mteb stores results."""
    from mteb.models.model_meta import ModelMeta

    overwrites = {"name": f"maxray/{name}", "revision": revision}
    return ModelMeta.create_empty(overwrites=overwrites)


def task_result(task: AbsTaskRetrieval, subset: str, split: str, row: BenchmarkRow) -> TaskResult:
    """Evaluates the rankings of a row with mteb, see `write`.

    Scores that depend on more than `row.k` documents per query are removed, unless the corpus has
    no more documents.
    """
    from mteb.results import TaskResult

    task.skip_first_result = False  # the rankings lack these documents
    rankings: Any = _Rankings(row)
    scores: Any = task.evaluate(rankings, split, subsets_to_run=[subset], encode_kwargs={})
    dataset: Any = task.dataset
    num_documents = len(dataset[subset][split]["corpus"])
    if row.k < min(num_documents, NUM_DOCUMENTS):
        scores = {
            name: {score: v for score, v in values.items() if _cutoff(score) <= row.k}
            for name, values in scores.items()
        }
    return TaskResult.from_task_results(task, {split: scores}, row.seconds)


class _Rankings:
    """Search model of mteb that returns given rankings."""

    def __init__(self, row: BenchmarkRow):
        self._rankings = row.rankings
        self.mteb_model_meta = model_meta(row.name, row.fingerprint or "none")

    def index(self, corpus: Any, **options: Any) -> None:
        """Does nothing."""

    def search(self, queries: Any, **options: Any) -> dict[str, dict[str, float]]:
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


def _remove(result: TaskResult, subset: str, split: str) -> None:
    others = [s for s in result.scores.get(split, []) if s["hf_subset"] != subset]
    scores = {**result.scores, split: others}
    result.scores = {name: values for name, values in scores.items() if values}
