"""Installation on machines without a network: cluster/offline."""

from __future__ import annotations

import hashlib
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "cluster/offline"


@pytest.fixture
def bundle(tmp_path):
    """The parts of an environment with one package."""
    package = tmp_path / "site/small"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("NUMBER = 1\n")
    archive = subprocess.run(
        ["tar", "cJ", "-C", tmp_path / "site", "."], capture_output=True, check=True
    ).stdout
    folder = tmp_path / "bundle"
    folder.mkdir()
    parts = {"part-00": archive[:100], "part-01": archive[100:]}
    for name, data in parts.items():
        (folder / name).write_bytes(data)
    lines = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in parts.items())
    (folder / "SHA256SUMS").write_text("".join(lines))
    shutil.copy(FOLDER / "install.sh", folder)
    return folder


def install(bundle):
    target = bundle.parent / "installed"
    done = subprocess.run([bundle / "install.sh", target], capture_output=True, text=True)
    return target, done


def test_parts_are_joined_and_imported(bundle):
    target, done = install(bundle)
    assert (done.returncode, done.stdout) == (0, "Imported 1 packages.\n"), done.stderr
    assert (target / "small/__init__.py").read_text() == "NUMBER = 1\n"


def test_missing_or_changed_part_is_named(bundle):
    (bundle / "part-01").write_bytes(b"")
    target, done = install(bundle)
    assert done.returncode and "part-01: FAILED" in done.stdout and not target.exists()
    (bundle / "part-01").unlink()
    target, done = install(bundle)
    assert done.returncode and "part-01" in done.stderr and not target.exists()


def test_scripts_are_valid():
    for name in ("pack.sh", "install.sh"):
        subprocess.run(["bash", "-n", FOLDER / name], check=True)
