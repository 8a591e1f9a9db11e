"""The snippets of the documentation rank like the libraries whose models they use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Index
from tests.conftest import ROOT
from tests.documentation import blocks
from tests.peers import remake

QUERIES = ("the drag of a wing", "heat")
TEXTS = ["lift and drag of a wing", "heat transfer in a cone", "the flow", "a flat plate. Heat!"]
IDS = list("abcd")
#: Largest error of a score relative to the number of query tokens, of one byte per number.
TOLERANCE = 0.01


def run(import_line: str, model: str, checkpoint: str, **values: Any) -> dict[str, Any]:
    """Runs the block that has a line, with another checkpoint, and returns its variables."""
    page = blocks(ROOT / "docs/tutorials/vectors.md")
    (text,) = [block.text for block in page if import_line in block.text]
    assert f'"{model}"' in text
    variables = {"ids": IDS, "texts": TEXTS, **values}
    exec(text.replace(model, checkpoint), variables)
    assert variables["hits"] == variables["index"].search(QUERIES[0])
    return variables


def assert_same_ranking(index: Index, scores_QN: torch.Tensor, num_tokens: int) -> None:
    """Compares hits with the scores of the library."""
    for query, scores in zip(QUERIES, scores_QN.tolist(), strict=True):
        expected = dict(zip(IDS, scores, strict=False))
        hits = index.search(query)
        assert [hit.item_id for hit in hits] == sorted(expected, key=expected.get, reverse=True)
        error = max(abs(hit.score - expected[hit.item_id]) for hit in hits)
        assert error < TOLERANCE * num_tokens


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("family", ["colbert_bert", "colbert_modernbert"])
def test_sentence_transformers(family: str, checkpoint: Callable[[str], str]):
    reason = "needs the extra sentence-transformers"
    pytest.importorskip("sentence_transformers", "6.2", reason=reason)
    line = "from sentence_transformers import MultiVectorEncoder"
    found = run(line, "colbert-ir/colbertv2.0", checkpoint(family))
    model = found["model"]
    queries = model.encode_query(list(QUERIES))
    scores = model.similarity(queries, model.encode_document(TEXTS))
    assert_same_ranking(found["index"], scores, len(queries[0]))


def test_pylate(tmp_path):
    pytest.importorskip("pylate", reason="needs PyLate")
    from pylate.rank import rerank

    folder = remake.checkpoint("pylate", tmp_path / "pylate") / "model"
    found = run("from pylate import models", "lightonai/GTE-ModernColBERT-v1", str(folder))
    queries = found["model"].encode(list(QUERIES), is_query=True)
    documents = found["model"].encode(TEXTS, is_query=False)
    ranked = rerank([IDS] * len(QUERIES), queries, [documents] * len(QUERIES))
    scores = [{row["id"]: row["score"] for row in rows} for rows in ranked]
    scores_QN = torch.tensor([[row[item_id] for item_id in IDS] for row in scores])
    assert_same_ranking(found["index"], scores_QN, len(queries[0]))


def test_colpali_engine(tmp_path):
    pytest.importorskip("colpali_engine", reason="needs colpali-engine")
    images = [*remake.images(), *remake.grid_images()][: len(IDS)]
    folder = remake.checkpoint("colqwen2", tmp_path / "colqwen2") / "base"
    found = run(
        "from colpali_engine.models import ColQwen2",
        "vidore/colqwen2-v1.0",
        str(folder),
        images=images,
        ids=IDS[: len(images)],
    )
    encode, processor, index = (found[name] for name in ("encode", "processor", "index"))
    items = encode(processor.process_images(images))
    queries = encode(processor.process_queries(list(QUERIES)))
    scores_QN = processor.score_multi_vector(queries, items)
    assert_same_ranking(index, scores_QN, queries.shape[1])
    lengths = [
        length for _, _, lengths in index.reader.tokens("full") for length in lengths.tolist()
    ]
    assert lengths == (items != 0).any(-1).sum(1).tolist()
    assert min(lengths) < items.shape[1]  # the images differ in size
