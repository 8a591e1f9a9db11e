"""Losses of ten steps of each learner, in float32 on tiny models."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import torch

from examples.papers.synthetic import SHAPES
from pipeline import config
from pipeline.registry import COMPRESSORS
from pipeline.train.loop import Loop
from pipeline.train.spec import TrainSpec
from tests.encoders.edje.models import language_model
from tests.goldens.indexes import folder, inputs
from tests.tiny.checkpoints import FAMILIES
from tests.train.contrastive.test_learned import text_lists

#: Fields of all runs that do not set them.
RUN = {
    "data": {
        "class": SHAPES,
        "num_scenes": 24,
        "captions": 2,
        "validation": 12,
    },
    "batch_size": 8,
    "epochs": 20,
    "max_steps": 10,
    "optimiser": {"learning_rate": 1e-3},
    "log_every": 1,
    "checkpoint_every": 10,
}
#: Tiny checkpoints that the runs train.
TINY = ("colpali", "colbert_modernbert", "qwen3_vl")
#: Values of the log that are stored.
LOGGED = ("loss", "gradient_norm", "R@1", "nDCG@10", "BoxMass")


@functools.cache
def checkpoint(family: str) -> str:
    """Writes a tiny checkpoint, as the fixture of this name does."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return str(FAMILIES[family](folder() / "checkpoints" / family))


def runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the fields of the runs by name."""
    tiny = {f"TINY/{name}": checkpoint(name) for name in TINY}
    fields = inputs("learners", **tiny)
    yield from fields.items()
    for name in COMPRESSORS.names():
        component = COMPRESSORS.load(name)
        if not component.needs_fit and name not in ("none", "agc", "memtok", "seqresize"):
            has_number = "num_vectors" in component.Spec.model_fields
            budget = {"num_vectors": 4} if has_number else {"ratio": 0.3}
            learner = {**fields["all"]["learner"], "compressor": {"name": name, **budget}}
            yield f"compressor {name}", {"learner": learner}


def learners() -> dict[str, Any]:
    """Trains each learner and returns the values that it logged."""
    (folder() / "language").mkdir()
    language_model(folder() / "language")
    text_lists(folder())
    found = {}
    for name, fields in runs():
        output = folder() / "runs" / name
        run = {**RUN, "name": "test", "output": str(output), **fields}
        Loop(config.parse(TrainSpec, run), say=lambda line: None).run()
        rows = map(json.loads, (output / "metrics.jsonl").read_text("utf-8").splitlines())
        found[name] = logged = {}
        for row in rows:
            for key in LOGGED:
                if key in row:
                    logged.setdefault(key, []).append(row[key])
    return found
