"""Tests of the package order, of imports without Ray and Lance, and of the test layout."""

from __future__ import annotations

import graphlib
import subprocess
import sys

from tests.architecture import diagram, documented, imports, modules, part
from tests.conftest import ROOT

#: Packages and modules in import order; each imports only from earlier rows.
ORDER = [
    ("extras",),
    ("paths",),
    ("config",),
    ("runtime",),
    ("defaults",),
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


def test_imports_follow_package_order():
    for path in FILES:
        name = part(path)
        assert name in RANK, f"add {name} to ORDER"
        for module in imports(path):
            if module.startswith("pipeline."):
                other = module.split(".")[1]
                assert other == name or RANK[other] < RANK[name], f"{path} imports {module}"


SHIPPED = sorted(path for folder in ("pipeline", "jobs") for path in (ROOT / folder).rglob("*.py"))


def test_wheel_imports_nothing_of_the_checkout():
    """The wheel has `pipeline` and `jobs` only, and `pipeline` does not import `jobs`."""
    for path in SHIPPED:
        outside = {"tests", "examples"}
        outside |= {"jobs"} if path.is_relative_to(ROOT / "pipeline") else set()
        assert not outside & {module.split(".")[0] for module in imports(path)}, path


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


def test_test_files_mirror_modules():
    """`tests/A/test_B.py` tests the module or folder `pipeline/A/B`, `A/B` or `tests/A/B`.

    `tests/A/B/test_C.py` tests behaviour C of the module `pipeline/A/B.py` or `A/B.py`.
    """
    for path in TESTS:
        name = path.stem.removeprefix("test_")
        folder = path.parent.relative_to(ROOT / "tests")
        subjects = [top / folder / name for top in (ROOT / "pipeline", ROOT, ROOT / "tests")]
        exists = any(s.is_dir() or s.with_suffix(".py").is_file() for s in subjects)
        exists |= any(s.parent.with_suffix(".py").is_file() for s in subjects)
        assert exists != (name in UNMIRRORED.get(path.parent.name, "").split()), path


def test_items_of_collections_are_listed_without_torch():
    names = ", ".join(f"pipeline.datasets.{name}" for name in ("karpathy", "msrvtt", "multivent"))
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
