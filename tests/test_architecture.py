"""Tests of the package order, of imports without Ray and Lance, and of the test layout."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import diagram, documented, imports, modules, part
from tests.conftest import ROOT

#: Packages and modules in import order; each imports only from earlier rows.
ORDER = [
    ("extras",),
    ("paths",),
    ("config",),
    ("runtime",),
    ("schema",),
    ("registry", "taps", "tokens"),
    ("data",),
    ("encoders",),
    ("compression",),
    ("index",),
    ("search",),
    ("eval",),
    ("train",),
    ("datasets",),
    ("serve",),
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


FILES = sorted(path for path in (ROOT / "pipeline").rglob("*.py") if path.parent.name != "pipeline")
FILES += sorted(path for path in (ROOT / "pipeline").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_package_order(path: Path):
    name = part(path)
    assert name in RANK, f"add {name} to ORDER"
    for module in imports(path):
        if module.startswith("pipeline."):
            other = module.split(".")[1]
            assert other == name or RANK[other] < RANK[name], f"{name} imports {other}"


SHIPPED = sorted(path for folder in ("pipeline", "jobs") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_wheel_imports_nothing_of_the_checkout(path: Path):
    """The wheel has `pipeline` and `jobs` only, and `pipeline` does not import `jobs`."""
    outside = {"tests", "examples"} | (
        {"jobs"} if path.is_relative_to(ROOT / "pipeline") else set()
    )
    assert not outside & {module.split(".")[0] for module in imports(path)}


def test_module_imports_are_acyclic():
    graphlib.TopologicalSorter(modules()).prepare()  # raises CycleError


def test_diagram_is_current():
    assert documented()[1] == diagram(), "run: python -m tests.architecture"


#: Test files without a module: this one, contracts of all components of a package, and tests of
#: files of `cluster` and of running clusters.
UNMIRRORED = {
    "tests": "security",
    "cluster": "draining image operations ports submission",
    "codecs": "contract cuda",
    "compression": "contract cuda",
    "encoders": "contract cuda",
    "peers": "vectors",
    "specs": "encoders",
    "tables": "sources",
    "train": "cuda",
}
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_test_files_mirror_modules(path: Path):
    """`tests/A/test_B.py` tests the module or folder `pipeline/A/B`, `A/B` or `tests/A/B`.

    `tests/A/B/test_C.py` tests behaviour C of the module `pipeline/A/B.py` or `A/B.py`.
    """
    name = path.stem.removeprefix("test_")
    folder = path.parent.relative_to(ROOT / "tests")
    subjects = [top / folder / name for top in (ROOT / "pipeline", ROOT, ROOT / "tests")]
    exists = any(s.is_dir() or s.with_suffix(".py").is_file() for s in subjects)
    exists |= any(s.parent.with_suffix(".py").is_file() for s in subjects)
    assert exists != (name in UNMIRRORED.get(path.parent.name, "").split())


@pytest.mark.parametrize("name", ["karpathy", "msrvtt", "multivent"])
def test_items_of_collections_are_listed_without_torch(name):
    code = f"import sys, pipeline.datasets.{name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_core_runs_without_ray_and_lance():
    code = """
import sys
from pipeline.registry import CANDIDATES, CODECS, COMPRESSORS, ENCODERS
from pipeline.registry import OCR, SOURCES, SPEECH, TRAINING_DATA
registries = (CANDIDATES, CODECS, COMPRESSORS, ENCODERS, OCR, SOURCES, SPEECH, TRAINING_DATA)
for registry in registries:
    for name in registry.names():
        registry.load(name)
import pipeline.search.maxsim, pipeline.tokens
import pipeline.encoders.edje.model, pipeline.encoders.edje.objectives
import pipeline.encoders.edje.candidates
import pipeline.train.loop, pipeline.train.contrastive
import pipeline.train.edje
unexpected = {"ray", "lance", "sentence_transformers"} & set(sys.modules)
assert not unexpected, unexpected
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
