"""Scores that mteb computes for miniatures of ArguAna, Quora and CQADupStack.

    python -m tests.datasets.mteb_scores [FILE.json]

Run it in an environment with the extra mteb, which the suite does not need. mteb reads a miniature
as a snapshot of the hub, and encodes it with the bundled all-MiniLM-L6-v2 by sentence-transformers.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.datasets import write_files
from tests.tiny.checkpoints import CRANFIELD

SCORES = Path(__file__).with_name("mteb_scores.json")
FORUMS = (
    *("Android", "English", "Gaming", "Gis", "Mathematica", "Physics", "Programmers", "Stats"),
    *("Tex", "Unix", "Webmasters", "Wordpress"),
)
#: Folders of BEIR, by task of mteb.
FOLDERS = {
    "ArguAna": "arguana",
    "QuoraRetrieval": "quora",
    **{f"CQADupstack{forum}Retrieval": f"cqadupstack/{forum.lower()}" for forum in FORUMS},
}
#: Task that aggregates those of CQADupStack.
CQADUPSTACK = "CQADupstackRetrieval"
METRICS = ("ndcg_at_10", "map_at_10", "mrr_at_10", "recall_at_3", "precision_at_3", "hit_rate_at_1")
LIBRARIES = ("mteb", "sentence-transformers", "transformers", "torch", "pytrec-eval-terrier")
#: Words per text, which fit into the window of the model.
NUM_WORDS = 60
README = """---
configs:
- {config_name: default, data_files: [{split: test, path: qrels/test.jsonl}]}
- {config_name: corpus, data_files: [{split: corpus, path: corpus.jsonl}]}
- {config_name: queries, data_files: [{split: queries, path: queries.jsonl}]}
---
"""


class Collection(NamedTuple):
    """Rows of a miniature as BEIR and mteb publish them."""

    corpus: list[dict[str, Any]]
    queries: list[dict[str, Any]]
    qrels: list[tuple[str, str]]


def collection(task: str) -> Collection:
    """Returns a miniature of a task, whose texts are those of Cranfield.

    Queries of ArguAna and Quora are documents with the same id. Those of CQADupStack are not.
    """
    texts, queries, judged = _cranfield()
    number, size = (FORUMS.index(task[11:-9]) + 2, 3) if "CQA" in task else (len(task) % 2, 12)
    chosen = list(queries)[number::14][:size]
    names = {name for query in chosen for name in judged[query][:4]}
    names |= set(list(texts)[7 * number : 7 * number + 20])
    has_titles = task != "QuoraRetrieval"
    corpus = [
        {"_id": f"d{name}", "title": row["title"] if has_titles else "", "text": row["text"]}
        for name, row in texts.items()
        if name in names
    ]
    asked = [{"_id": f"q{name}", "text": queries[name]} for name in chosen]
    if "CQA" not in task:
        corpus += [{**row, "title": ""} for row in asked]
    corpus = [{**row, "metadata": {}} for row in corpus]
    asked = [{**row, "metadata": {}} for row in asked]
    pairs = [(f"q{query}", f"d{name}") for query in chosen for name in judged[query][:4]]
    return Collection(corpus, asked, pairs)


def _cranfield() -> tuple[dict[str, dict[str, str]], dict[str, str], dict[str, list[str]]]:
    def read(name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (CRANFIELD / name).read_text("utf-8").splitlines()]

    texts = {}
    for row in read("corpus.jsonl"):
        words = row["text"].removeprefix(row["title"]).split()[:NUM_WORDS]
        texts[row["_id"]] = {"title": row["title"], "text": " ".join(words)}
    judged: dict[str, list[str]] = {}
    with (CRANFIELD / "qrels/test.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if int(row["score"]) > 0 and row["corpus-id"] in texts:
                judged.setdefault(row["query-id"], []).append(row["corpus-id"])
    queries = {row["_id"]: row["text"] for row in read("queries.jsonl") if row["_id"] in judged}
    return texts, queries, judged


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_beir(folder: Path, task: str) -> Path:
    """Writes a miniature as in the archives of BEIR."""
    corpus, queries, qrels = collection(task)
    header = "query-id\tcorpus-id\tscore\n"
    judgments = header + "".join(f"{query}\t{document}\t1\n" for query, document in qrels)
    files = {"corpus.jsonl": _lines(corpus), "queries.jsonl": _lines(queries)}
    files["qrels/test.tsv"] = judgments.encode()
    if task == "QuoraRetrieval":  # has another split
        files["qrels/dev.tsv"] = f"{header}{queries[0]['_id']}\t{corpus[0]['_id']}\t1\n".encode()
    write_files(folder / FOLDERS[task], list(files.items()))
    return folder / FOLDERS[task]


def write_snapshot(folder: Path, task: str) -> Path:
    """Writes a miniature as mteb's data sets on the hub, with floating point scores."""
    corpus, queries, qrels = collection(task)
    judgments = [{"query-id": q, "corpus-id": d, "score": 1.0} for q, d in qrels]
    files = {
        "README.md": README.encode(),
        "corpus.jsonl": _lines(corpus),
        "queries.jsonl": _lines(queries),
        "qrels/test.jsonl": _lines(judgments),
    }
    write_files(folder / task, list(files.items()))
    return folder / task


def main(file: str) -> None:
    """Computes and writes the scores."""
    import mteb
    from sentence_transformers import SentenceTransformer

    from pipeline.encoders.loading import bundled_folder

    model = SentenceTransformer(str(bundled_folder()), device="cpu")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in FOLDERS:
            task = mteb.get_task(name)
            dataset = {"path": str(write_snapshot(Path(folder), name)), "revision": "1"}
            task.metadata = task.metadata.model_copy(update={"dataset": dataset})
            (results[name],) = mteb.evaluate(model, task, cache=None).task_results
    parts = [result for name, result in results.items() if name.startswith("CQADupstack")]
    results[CQADUPSTACK] = mteb.get_task(CQADUPSTACK).combine_task_results(parts)
    scores = {
        name: {
            metric: value
            for metric, value in result.scores["test"][0].items()
            if metric in (*METRICS, "main_score")
        }
        for name, result in results.items()
    }
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    data = {"versions": versions, "scores": scores}
    Path(file).write_text(json.dumps(data, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [str(SCORES)]))
