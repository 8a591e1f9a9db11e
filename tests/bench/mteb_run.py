"""Evaluates an encoder on a snapshot of a task of mteb, with Maxray or with mteb.

    python -m tests.bench.mteb_run maxray SNAPSHOT FOLDER
    python -m tests.bench.mteb_run mteb SNAPSHOT FOLDER

The last line of the output is a JSON object with the throughputs, the main score and the seconds
from the start of the process to the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch

import jobs
from pipeline.config import load, parse
from pipeline.datasets.mteb import Items, Task
from pipeline.encoders.colpali import ColPali
from pipeline.tokens import unit_vectors
from tests.bench.mteb import TASK

START = time.perf_counter()
ENCODER = {
    "name": "colpali",
    "model": str(Path(jobs.__file__).parent / "data/models/shapes_colpali"),
    "dtype": "float32",
}
#: Both sides encode with two threads.
RESOURCES = Path(jobs.__file__).parents[1] / "cluster/profiles/laptop.yaml"
#: Documents per query that mteb evaluates.
NUM_DOCUMENTS = 1000


def main() -> None:
    """Runs one side and prints its result."""
    side, snapshot, folder = sys.argv[1:]
    source = {"name": "mteb", "task": TASK, "data": snapshot}
    result = {"maxray": run_maxray, "mteb": run_mteb}[side](source, folder)
    print(json.dumps({**result, "seconds": time.perf_counter() - START}))


def run_maxray(source: dict[str, Any], folder: str) -> dict[str, float]:
    """Runs an index job and an evaluation. Their times include loading the encoder."""
    from pipeline.eval.evaluation import run
    from pipeline.eval.spec import EvaluateSpec
    from pipeline.index import job
    from pipeline.index.spec import IndexResources, IndexSpec

    index = {
        "index": f"{folder}/index",
        "source": source,
        "encoder": ENCODER,
        "representations": [{"compressor": "none", "codec": "float32"}],
    }
    evaluation = {
        "index": f"{folder}/index",
        "benchmark": source,
        "output": f"{folder}/evaluation",
        "k": NUM_DOCUMENTS,
        "scores": ["maxsim"],
        "bm25": False,
        "diagnostics": False,
    }
    resources = load(IndexResources, str(RESOURCES))
    with jobs.cluster(resources.object_store_bytes):
        start = time.perf_counter()
        progress = job.run(
            parse(IndexSpec, index), resources, job="bench", report=lambda line: None
        )
        indexed = time.perf_counter()
    evaluated = time.perf_counter()
    result = run(parse(EvaluateSpec, evaluation), lambda line: None)
    end = time.perf_counter()
    (row,) = result.results
    return {
        "pages_per_second": progress.new / (indexed - start),
        "queries_per_second": len(row.values) / (end - evaluated),
        "main_score": row.means[result.headline],
    }


class Model:
    """Multi-vector encoder of mteb that calls an encoder of Maxray."""

    def __init__(self) -> None:
        spec = parse(ColPali.Spec, ENCODER)
        self._encoder, self._reader = ColPali(spec), ColPali.reader(spec)
        self.seconds = {"document": 0.0, "query": 0.0}

    @property
    def mteb_model_meta(self) -> Any:
        """Metadata of the model."""
        from pipeline.datasets.mteb_results import model_meta

        return model_meta("bench", "1")

    @torch.no_grad()
    def encode(self, inputs: Any, *, prompt_type: Any, **options: Any) -> list[torch.Tensor]:
        """Returns the token vectors of each input."""
        start = time.perf_counter()
        vectors: list[torch.Tensor] = []
        for batch in inputs:
            if prompt_type.value == "query":
                tokens = self._encoder.encode_queries(batch["text"]).tokens
            else:
                pages = (image.convert("RGB") for image in batch["image"])
                read = [[self._reader.read_image(page, torch.nan, torch.nan)] for page in pages]
                tokens = self._encoder.tokens(read)
            unit = unit_vectors(tokens)
            vectors += [row[mask] for row, mask in zip(unit, tokens.mask, strict=True)]
        self.seconds[prompt_type.value] += time.perf_counter() - start
        return vectors

    def similarity(self, a: Any, b: Any) -> torch.Tensor:
        """Returns the MaxSim scores of all pairs."""
        from mteb.similarity_functions import max_sim

        return max_sim(a, b)

    def similarity_pairwise(self, a: Any, b: Any) -> torch.Tensor:
        """Returns the MaxSim scores of corresponding pairs."""
        from mteb.similarity_functions import pairwise_max_sim

        return pairwise_max_sim(a, b)


def run_mteb(source: dict[str, Any], folder: str) -> dict[str, float]:
    """Runs mteb's evaluation. The time of the documents includes loading data and encoder."""
    start = time.perf_counter()
    task = cast(Any, Task(parse(Items.Spec, source)))
    task.load()
    num_documents = len(task.mteb.dataset["default"]["test"]["corpus"])
    num_queries = len(task.mteb.dataset["default"]["test"]["queries"])
    model = Model()
    loaded = time.perf_counter()
    scores: Any = task.mteb.evaluate(model, "test", encode_kwargs={"batch_size": 32})
    end = time.perf_counter()
    documents = model.seconds["document"]
    return {
        "pages_per_second": num_documents / (documents + loaded - start),
        "queries_per_second": num_queries / (end - loaded - documents),
        "main_score": scores["default"]["main_score"],
    }


if __name__ == "__main__":
    main()
