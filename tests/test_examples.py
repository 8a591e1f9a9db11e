"""Runs the examples in separate processes."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


def run(*arguments: object, **environment: str) -> str:
    """Runs Python in the root of the repository and returns its standard output."""
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_core_without_ray():
    lines = run(EXAMPLES / "core_without_ray.py").splitlines()
    for name in ("none: ", "hpool: 20 vectors"):
        (row,) = (i for i, line in enumerate(lines) if line.startswith(name))
        assert "swept leading edge" in lines[row + 1]


@pytest.mark.heavy  # starts a Ray cluster
def test_own_vectors(tmp_path):
    lines = run(EXAMPLES / "own_vectors.py", tmp_path).splitlines()
    found = [line for line in lines if line.startswith(("full [", "hpool_8 ["))]
    assert [line.split("'")[1] for line in found] == ["item-007", "item-007"]
    assert found[0].split()[2].startswith("5.0")  # five tokens with similarity 1


@pytest.fixture
def site_packages(tmp_path) -> Path:
    """Folder with the modules and entry points of the installed example package."""
    package = EXAMPLES / "custom_compressor"
    shutil.copytree(package / "maxray_first_last", tmp_path / "maxray_first_last")
    metadata = tmp_path / "maxray_first_last-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: maxray-first-last\n")
    entry = "[maxray.compressors]\nfirst_last = maxray_first_last:FirstLast\n"
    assert 'first_last = "maxray_first_last:FirstLast"' in (package / "pyproject.toml").read_text()
    (metadata / "entry_points.txt").write_text(entry)
    return tmp_path


def test_custom_compressor_is_registered_by_entry_point(site_packages):
    code = """
import torch
from pipeline.registry import COMPRESSORS
from pipeline.tokens import TokenBatch
compressor = COMPRESSORS.build(COMPRESSORS.resolve({"name": "first_last", "num_vectors": 3}))
vectors = torch.eye(5).unsqueeze(0)
batch = TokenBatch(vectors, torch.ones(1, 5, dtype=torch.bool), normalised=True)
print(compressor.compress(batch).vectors[0].argmax(dim=1).tolist())
"""
    path = f"{site_packages}{os.pathsep}{ROOT}"
    assert run("-c", code, PYTHONPATH=path).strip() == "[0, 1, 4]"


@pytest.mark.heavy  # indexes pages
def test_notebook(tmp_path, monkeypatch):
    """Runs the cells, and checks that `make notebook` has stored small outputs without errors."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(tmp_path / "examples")
    text = (EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8")
    assert len(text) < 50_000
    namespace: dict[str, object] = {}
    shown = []
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert {output["output_type"] for output in cell["outputs"]} & {"stream", "execute_result"}
        assert "error" not in {output["output_type"] for output in cell["outputs"]}
        *statements, last = ast.parse("".join(cell["source"])).body
        assert isinstance(last, ast.Expr)
        exec(compile(ast.Module(statements, []), "cell", "exec"), namespace)
        shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), namespace))
    _, *hits, words = shown
    assert len(hits) == 3 and all("<mark>" in found._repr_html_() for found in hits)
    assert "rgba(" in words._repr_html_()
