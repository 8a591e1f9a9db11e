"""The shipped spec of each family says what its encoder takes, and lists the shipped data."""

from __future__ import annotations

import contextlib

import pytest

from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.planning.trial import dry_run
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.registry import ENCODERS
from tests.conftest import ROOT
from tests.encoders.endpoints import MODEL, ImageModel, serve

FILES = sorted((ROOT / "jobs/specs/encoders").glob("*.yaml"))
#: The tiny checkpoint in the place of the one that a spec names.
TINY = {
    "siglip2": "siglip",
    "colbert": "colbert_bert",
    "sentence_transformers": "colbert_modernbert",
    "http": "colpali",
}


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dry_run(cluster, checkpoint, monkeypatch, stack, path):
    monkeypatch.chdir(ROOT)
    tiny = checkpoint(TINY.get(path.stem, path.stem))
    if path.stem == "sentence_transformers":
        pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    given = [f"encoder.model={tiny}", "encoder.dtype=float32"]
    if path.stem == "http":
        server = stack.enter_context(serve(ImageModel(tiny)))
        given = [f"encoder.model={MODEL}", f"encoder.url={server.url}", "encoder.dim=16"]
    if path.stem in ("qwen3_vl", "qwen2_5_omni"):  # whose windows are short
        given.append("encoder.max_pixels=4096")
    spec = config.load(IndexSpec, str(path), given)
    lines: list[str] = []
    dry_run(spec, IndexResources(), 8, lines.append)
    assert any(line.startswith("encoded 8 items") for line in lines)
    assert not any("rejected" in line for line in lines)


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem != "http"], ids=lambda path: path.stem
)
def test_a_hub_that_cannot_be_reached(path, monkeypatch):
    """One sentence, which says what to do offline."""
    monkeypatch.chdir(ROOT)
    spec = config.load(IndexSpec, str(path), [])
    with pytest.raises(SpecError, match="offline") as caught:
        ENCODERS.load(spec.encoder.name).check(spec.encoder)
    assert caught.value.field == "model" and "\n" not in str(caught.value)


def test_an_endpoint_that_cannot_be_reached(monkeypatch):
    monkeypatch.chdir(ROOT)
    given = ["encoder.url=http://127.0.0.1:9"]
    spec = config.load(IndexSpec, str(ROOT / "jobs/specs/encoders/http.yaml"), given)
    with pytest.raises(SpecError, match="^url must be the URL of a server that answers") as caught:
        ENCODERS.load("http").check(spec.encoder)
    assert "\n" not in str(caught.value)
