"""Indexes and tiny models for tests of rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import config

TEXTS = {
    "a": "the lift of a wing in a slipstream",
    "b": "drag of a cone at high speed",
    "c": "heat transfer at the wing of a plane in a flow of hot air",
    "d": "a boat",
    "e": "flow around a cone",
}


def index_texts(folder: Path, encoder: dict[str, Any]) -> str:
    """Indexes texts as single vectors of their tokens, and returns the URI."""
    from pipeline.index import job
    from pipeline.index.spec import IndexResources, IndexSpec

    rows = [json.dumps({"_id": name, "text": text}) for name, text in TEXTS.items()]
    (folder / "texts.jsonl").write_text("\n".join(rows), "utf-8")
    spec = {
        "index": str(folder / "index"),
        "source": {"name": "text", "path": str(folder / "texts.jsonl")},
        "encoder": encoder,
        "representations": [{"compressor": "none", "id": "full"}],
    }
    job.run(config.parse(IndexSpec, spec), IndexResources(), job="1", report=lambda line: None)
    return spec["index"]


@pytest.fixture(scope="session")
def texts(cluster, checkpoint, tmp_path_factory) -> str:
    """URI of an index of texts."""
    encoder = {"name": "colbert", "model": checkpoint("colbert_bert"), "dtype": "float32"}
    return index_texts(tmp_path_factory.mktemp("texts"), encoder)


@pytest.fixture(scope="session")
def cross_encoder(checkpoint) -> str:
    """Folder of a tiny cross-encoder that sentence-transformers has saved."""
    return checkpoint("cross_encoder")
