"""The specs that `plan --model` prints for published models run on tiny checkpoints."""

from __future__ import annotations

import contextlib

import pytest
import yaml

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.planning.models import plan_model, published_models
from pipeline.eval.planning.trial import dry_run
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import ENCODERS
from tests import hub
from tests.conftest import ROOT
from tests.encoders.endpoints import MODEL, ImageModel, serve

ENDPOINT = "nvidia/nemotron-colembed-vl-4b-v2"
#: The tiny checkpoint in the place of a published one, and assignments.
TINY: dict[str, tuple[str, list[str]]] = {
    "vidore/colpali-v1.3-hf": ("colpali", []),
    "vidore/colqwen2-v1.0-hf": ("colqwen2", []),
    "ModernVBERT/colmodernvbert": ("colmodernvbert", []),
    "Qwen/Qwen3-VL-Embedding-2B": ("qwen3_vl", ["encoder.max_pixels=4096"]),  # of short windows
    "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct": (
        "qwen2_vl",  # GME's own minimum exceeds its window
        ["encoder.preprocessing=transformers", "encoder.max_pixels=4096"],
    ),
    "Qwen/Qwen2.5-Omni-3B": ("qwen2_5_omni", ["encoder.max_pixels=4096"]),
    "jinaai/jina-embeddings-v4": ("jina_v4", []),
    "google/siglip2-base-patch16-384": ("siglip", []),
    "colbert-ir/colbertv2.0": ("colbert_bert", []),
    "lightonai/GTE-ModernColBERT-v1": ("colbert_modernbert", []),
    "sentence-transformers": ("colbert_modernbert", ["encoder.name=sentence_transformers"]),
    ENDPOINT: ("colpali", []),
}
PUBLISHED = {name: model for name, model in published_models().items() if not model.refused}


#: Models of an encoder that other models cover.
COVERED = {
    "vidore/colqwen2-v1.0-hf",
    "ModernVBERT/colmodernvbert",
    "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct",
    "colbert-ir/colbertv2.0",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.heavy] * (name in COVERED)) for name in TINY],
)
def test_a_dry_run(cluster, checkpoint, monkeypatch, tmp_path, name):
    monkeypatch.chdir(ROOT)
    family, given = TINY[name]
    if name == "sentence-transformers":
        pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
        name = "lightonai/GTE-ModernColBERT-v1"
    tiny = checkpoint(family)
    (tmp_path / "hub").mkdir()
    with (
        hub.serve(tmp_path / "hub") as server,
        hub.connected(server, tmp_path / "cache"),
        contextlib.ExitStack() as stack,
    ):
        server.publish(name, tiny, commit=PUBLISHED[name].revision)
        printed = yaml.safe_load(plan_model(name, given).text())
        assert printed["encoder"]["model"] == name
        # Workers are not connected to the hub.
        local = [f"encoder.model={tiny}", "encoder.revision=null", "encoder.dtype=float32"]
        if name == ENDPOINT:
            endpoint = stack.enter_context(serve(ImageModel(tiny)))
            local = [f"encoder.model={MODEL}", f"encoder.url={endpoint.url}", "encoder.dim=16"]
        spec = config.parse(IndexSpec, config.override(printed, local))
        lines: list[str] = []
        dry_run(spec, IndexResources(), 8, lines.append)
    assert any(line.startswith("encoded 8 items") for line in lines)
    assert not any("rejected" in line for line in lines)


@pytest.mark.parametrize("name", [n for n in PUBLISHED if "name" not in PUBLISHED[n].encoder])
def test_a_hub_that_cannot_be_reached(name):
    """One sentence, which says what to do offline."""
    with pytest.raises(SpecError, match="offline") as caught:
        plan_model(name)
    assert caught.value.field == "model" and "\n" not in str(caught.value)


def test_an_endpoint_that_cannot_be_reached():
    plan = plan_model(ENDPOINT, ["encoder.url=http://127.0.0.1:9"])
    spec = config.parse(IndexSpec, plan.spec).encoder
    with pytest.raises(SpecError, match="^url must be the URL of a server that answers") as caught:
        ENCODERS.load("http").check(spec)
    assert "\n" not in str(caught.value)
