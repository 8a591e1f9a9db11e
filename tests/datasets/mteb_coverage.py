"""Reads a miniature of every retrieval task of mteb and reports which of them load.

    python -m tests.datasets.mteb_coverage docs/results/mteb-tasks.csv

A miniature has the layout that mteb's loader of the task reads, with the modalities, the split and
the first subset of the task. Tasks whose own loader reads another layout have no miniature.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.config import SpecError
from pipeline.registry import BENCHMARKS, SOURCES
from pipeline.schema import Item
from pipeline.search.media import query_parts
from tests.datasets import mteb_data

#: Layouts of tasks with a loader of their own, by a prefix of the name of its module.
LAYOUTS = {
    "vidore_bench": mteb_data.vidore_v1,
    "vidore2_bench": mteb_data.vidore_v2,
    "jina_vdr_bench": mteb_data.jina_vdr,
    "bright_v1_1": mteb_data.bright,
    "lemb": mteb_data.long_embed,
    "clotho": mteb_data.captions,
    "valor_32k": mteb_data.pairs,
    "msr_vtt": mteb_data.pairs,
    "msvd": mteb_data.pairs,
    "vatex": mteb_data.pairs,
    "didemo": mteb_data.pairs,
    "activitynet": mteb_data.pairs,
    "audiocaps_av": mteb_data.pairs,
    "youcook2": mteb_data.pairs,
    "panda70m": mteb_data.pairs,
}
COLUMNS = ("task", "type", "category", "main_score", "layout", "corpus", "queries")


def layout(task: Any) -> Any:
    """Returns the function that writes the miniature of a task, or None."""
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    loader = type(task).load_data
    if loader is AbsTaskRetrieval.load_data:
        return mteb_data.standard
    module = loader.__module__.rpartition(".")[2]
    return next((write for name, write in LAYOUTS.items() if module.startswith(name)), None)


def check(task: Any, folder: Path) -> dict[str, str]:
    """Loads the miniature of a task and returns its row of the table."""
    metadata, write = task.metadata, layout(task)
    row = {
        "task": metadata.name,
        "type": metadata.type,
        "category": metadata.category,
        "main_score": metadata.main_score,
        "layout": write.__name__ if write else "",
    }
    if write is None:
        return {**row, "corpus": "no miniature", "queries": "no miniature"}
    options: dict[str, Any] = {}
    if write is mteb_data.standard:
        options["pools"] = metadata.type.endswith(("Reranking", "QA"))
        options["instructions"] = metadata.type.startswith("Instruction")
        if metadata.is_multilingual:
            options["subsets"] = metadata.hf_subsets[:1]
    if "valor" in metadata.name.lower():
        options["caption"] = "description"
    data = write(folder, metadata.name, **options)
    selection = {"subset": metadata.hf_subsets[0], "split": metadata.eval_splits[0]}
    spec = {"name": "mteb", "task": metadata.name, "data": str(data), **selection}
    return {**row, "corpus": read_corpus(spec), "queries": read_queries(spec)}


def read_corpus(spec: dict[str, Any]) -> str:
    """Returns the modality of the items of a corpus, or the error."""
    try:
        source = SOURCES.build(SOURCES.resolve(spec), ("text", "image", "frames", "audio"))
        source.check()
        results = []
        for shard in source.shards():
            listed = list(enumerate(source.scan(shard)))
            results += list(
                source.decode(shard, [entry for entry in listed if isinstance(entry[1], Item)])
            )
        return " ".join(sorted({item.modality for item in results if isinstance(item, Item)}))
    except SpecError as error:
        return f"error: {error.problem}"


def read_queries(spec: dict[str, Any]) -> str:
    """Returns the kind of the queries and whether they have pools, or the error."""
    try:
        judged = BENCHMARKS.build(BENCHMARKS.resolve(spec)).load()
    except SpecError as error:
        return f"error: {error.problem}"
    query = next(judged.inputs(judged.queries))
    kind = " and ".join(query_parts(query))
    return f"{kind}, pools" if judged.pools is not None else kind


def main(output: str) -> None:
    import mteb
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    warnings.simplefilter("ignore")
    tasks = [task for task in mteb.get_tasks() if isinstance(task, AbsTaskRetrieval)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, task in enumerate(tasks):
            rows.append(check(task, Path(folder) / str(number)))
            print(f"{number + 1}/{len(tasks)}", *rows[-1].values(), sep="\t", flush=True)
    with open(output, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["task"].lower()))
    for column in ("corpus", "queries"):
        counts = Counter(row[column].partition(" (")[0] for row in rows)
        print(column, *(f"{n} {name}" for name, n in counts.most_common()), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1])
