"""Our vectors of published models beside the reference vectors of their libraries."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from pipeline import config
from pipeline.eval.planning.models import plan_model, published_models
from pipeline.index.spec import IndexSpec
from pipeline.registry import ENCODERS
from tests import hub
from tests.images import png
from tests.peers import reference

#: Difference of projections: that of float32 in models of billions of parameters.
TOLERANCE = 1e-3


def compare(model: str, saved: dict, tolerance: float) -> None:
    """Compares our vectors of a model at the revision of the reference."""
    given = [f"encoder.revision={saved['revision']}", "encoder.dtype=float32"]
    given += [f"encoder.{name}={value}" for name, value in saved["settings"].items()]
    spec = config.parse(IndexSpec, plan_model(model, given).spec).encoder
    encoder = ENCODERS.build(spec)
    vectors = {"query": encoder.encode_queries([reference.QUERY]).tokens}
    if "page" in saved["vectors"]:
        items = pa.table({"item_id": ["page"], "image": [png(reference.page())]})
        ((_, vectors["page"]),) = encoder.encode(type(encoder).preprocessor(spec)(items))
    for name, expected in saved["vectors"].items():
        found = reference.summary(vectors[name].vectors[0].float().numpy())
        assert found["shape"] == expected["shape"], name
        difference = np.abs(np.subtract(found["projections"], expected["projections"])).max()
        assert difference < tolerance, f"{name}: {difference}"


@pytest.mark.hub
@pytest.mark.parametrize("model", reference.PEERS)
def test_published_vectors(model):
    path = reference.file_name(model)
    if not path.exists():
        pytest.skip(f"no reference vectors; make them with python -m tests.peers.reference {model}")
    compare(model, json.loads(path.read_text("utf-8")), TOLERANCE)


def test_peers_are_published_models():
    known = published_models()
    for name, peer in reference.PEERS.items():
        prefix = known[name].encoder.get("query_prefix")
        assert peer.settings == ((("query_prefix", prefix),) if prefix else ()), name


def test_the_command_makes_what_the_test_compares(checkpoint, tmp_path, monkeypatch):
    """On a tiny checkpoint of a local hub, with transformers as the library."""
    monkeypatch.setattr(reference, "FOLDER", tmp_path / "references")
    (tmp_path / "hub").mkdir()
    with hub.serve(tmp_path / "hub") as server, hub.connected(server, tmp_path / "cache"):
        commit = server.publish("authors/model", checkpoint("colpali"))
        path = reference.make("authors/model", reference.native("ColPali"))
        saved = json.loads(path.read_text("utf-8"))
        assert (saved["revision"], saved["library"]) == (commit, "transformers")
        assert path.stat().st_size < 20_000
        compare("authors/model", saved, 1e-5)
        saved["vectors"]["page"]["projections"][3][2] += 1e-3
        with pytest.raises(AssertionError, match="page"):
            compare("authors/model", saved, 1e-4)
