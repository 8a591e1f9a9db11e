"""Indexes and tiny models for tests of rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import config
from tests.tiny import checkpoints

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
def cross_encoder(checkpoint, tmp_path_factory) -> str:
    """Folder of a tiny cross-encoder that sentence-transformers has saved."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("cross_encoder")
    words = AutoTokenizer.from_pretrained(checkpoint("colbert_bert"))
    sizes = checkpoints.small_text_config(words)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = BertConfig(**sizes, max_position_embeddings=64, num_labels=1)
        model = BertForSequenceClassification(settings)
        torch.nn.init.normal_(model.classifier.weight, std=2.0)
        model.save_pretrained(folder / "plain")
    words.model_max_length = 64
    words.save_pretrained(folder / "plain")
    CrossEncoder(str(folder / "plain")).save_pretrained(str(folder / "saved"))
    return str(folder / "saved")
