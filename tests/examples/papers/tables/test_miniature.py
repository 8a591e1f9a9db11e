"""Generated data of miniatures."""

from __future__ import annotations

import json

import pytest

from examples.papers.tables.miniature import generate
from pipeline.config import SpecError
from pipeline.datasets import beir
from pipeline.registry import BENCHMARKS, SOURCES, TRAINING_DATA


def test_only_what_specs_refer_to_is_generated(tmp_path):
    folder = tmp_path / "miniature"
    specs = [
        {"source": {"path": f"{folder}/texts"}, "models": [f"{folder}/models/bert/x", "data/y"]}
    ]
    generate(specs, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["models", "texts"]
    before = (folder / "texts/corpus.jsonl").stat().st_mtime_ns
    generate(specs, folder)
    assert (folder / "texts/corpus.jsonl").stat().st_mtime_ns == before
    judged = BENCHMARKS.build(beir.Queries.Spec(path=str(folder / "texts"))).load()
    assert len(judged.queries) == 8
    ids = {json.loads(line)["_id"] for line in (folder / "texts/corpus.jsonl").open()}
    assert {document for grades in judged.qrels.values() for document in grades} <= ids


def test_unknown_data(tmp_path):
    with pytest.raises(SpecError, match="path below miniature/ must be one of"):
        generate([f"{tmp_path}/shape/images"], tmp_path)


@pytest.mark.parametrize("name", ["msrvtt", "multivent", "karpathy"])
def test_data_sets_have_the_published_formats(tmp_path, name):
    generate([f"{tmp_path}/{name}"], tmp_path)
    folder = tmp_path / name
    csv_file, queries = folder / "MSRVTT_JSFUSION_test.csv", folder / "queries.csv"
    videos = {"videos": folder / "videos"}
    judgments = {"judgments": folder / "judgments.jsonl"}
    sentences = {"path": folder / "MSRVTT_data.json", "ids": folder / "MSRVTT_train.9k.csv"}
    source, benchmark, data = {
        "msrvtt": (
            {"path": folder / "videos", "video_ids": csv_file},
            {"path": csv_file},
            {**sentences, **videos},
        ),
        "multivent": (
            {"path": folder / "videos"},
            {"path": queries, **judgments},
            {"path": queries, **judgments, **videos},
        ),
        "karpathy": (
            {"path": folder / "dataset.json", "images": folder / "images"},
            {"path": folder / "dataset.json"},
            {"name": "webdataset", "path": folder / "archives"},
        ),
    }[name]

    def resolved(registry, fields):
        return registry.resolve({"name": name, **{k: str(value) for k, value in fields.items()}})

    SOURCES.build(resolved(SOURCES, source), ("item_id",)).check()
    judged = BENCHMARKS.build(resolved(BENCHMARKS, benchmark)).load()
    training = TRAINING_DATA.build(resolved(TRAINING_DATA, data), batch_size=2, seed=0)
    assert len(judged.queries) == (16 if name == "karpathy" else 2)
    assert training.num_batches == (4 if name == "karpathy" else 1)
