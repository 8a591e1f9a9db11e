"""Latency of the forward pass and of compressors."""

from __future__ import annotations

import pytest
import torch

from examples.papers.tables.latency import LatencySpec, run
from examples.papers.tables.plan import Cell
from examples.papers.tables.values import cell_value
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval.results import read_results
from tests.conftest import ROOT

SPEC = ROOT / "examples/papers/specs/methods/latency.yaml"


def spec(output, device: str) -> LatencySpec:
    """Returns the shipped spec with the small ColPali and scenes of shapes."""
    fields = config.read(str(SPEC), "spec") | {
        "source": {"name": "images", "path": str(ROOT / "jobs/data/photos/images")},
        "encoder": {
            "name": "colpali",
            "model": str(ROOT / "jobs/data/models/shapes_colpali"),
            "dtype": "float32",
            "output_tokens": "visual",
        },
        "device": device,
        "num_items": 3,
        "output": str(output),
    }
    return config.parse(LatencySpec, fields)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_latency_is_measured_per_item(tmp_path, device):
    run(spec(tmp_path, device))
    evaluation = read_results(str(tmp_path), "evaluation")
    names = [result.representation for result in evaluation.results]
    methods = ["random_10pct", "adaptive_eos_10pct", "sap_max_10pct", "sap_10pct", "cluster_10pct"]
    assert names == ["full", "full_statistics", *methods]
    assert all(len(result.values) == 3 and result.means["ms"] > 0 for result in evaluation.results)
    cells = [
        Cell(str(tmp_path), {"representation": "sap_10pct", "measure": measure})
        for measure in ("ms", "relative ms")
    ]
    ms, overhead = (cell_value([cell], percent=False) for cell in cells)
    assert overhead == pytest.approx(100 * ms / evaluation.results[0].means["ms"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_missing_gpu(tmp_path):
    with pytest.raises(SpecError, match="device must be an available device, got 'cuda', which is"):
        run(spec(tmp_path, "cuda"))
