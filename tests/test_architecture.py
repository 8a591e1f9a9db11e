"""The order of the parts: what may import what, and what runs without Ray and Lance."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Data reads from top to bottom; a part imports only what stands above it, or its own.
ORDER = [
    ("config",),
    ("atomic", "checkpoint"),
    ("schema",),
    ("registry",),
    ("tokens", "taps", "decoding", "distributed"),
    ("transcribe",),
    ("sources", "encoders", "compression", "codecs"),
    ("rerank",),
    ("stage",),
    ("index",),
    ("search",),
    ("eval",),
    ("report",),
    ("serve",),
    ("training_data",),
    ("train",),
    ("synthetic",),
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "pipeline":
            yield from (f"pipeline.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


FILES = sorted(path for path in (ROOT / "pipeline").rglob("*.py") if path.parent.name != "pipeline")
FILES += sorted(path for path in (ROOT / "pipeline").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_part_imports_only_what_stands_above_it(path: Path):
    part = path.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")
    assert part in RANK, f"say in ORDER where {part} stands"
    for module in imports(path):
        assert not module.startswith("jobs"), module
        if module.startswith("pipeline."):
            other = module.split(".")[1]
            assert other == part or RANK[other] < RANK[part], f"{part} imports {other}"


def test_the_core_runs_without_ray_and_lance():
    code = """
import sys
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS, OCR, SOURCES, SPEECH, TRAINING_DATA
for registry in (CODECS, COMPRESSORS, ENCODERS, OCR, SOURCES, SPEECH, TRAINING_DATA):
    for name in registry.names():
        registry.load(name)
import pipeline.search.maxsim, pipeline.tokens
import pipeline.rerank.edje, pipeline.rerank.objectives, pipeline.rerank.pool
import pipeline.train.loop, pipeline.train.contrastive, pipeline.synthetic.shapes_data
import pipeline.train.edje
there = {"ray", "lance", "sentence_transformers"} & set(sys.modules)
assert not there, there
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
