"""Tests of golden values, and of their comparison."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.goldens import files


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_values_equal_the_golden_ones():
    command = [sys.executable, "-m", "tests.goldens", "check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout or done.stderr


def test_differences(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    before = {"kept": {"sha256": "a", "sum": 2.0}, "gone": [1, 2]}
    files.write("part", before)
    assert not list(files.differences("part", before))
    after = {"kept": {"sha256": "b", "sum": 2.01}, "new": None}
    absent = ["part: removed: gone[0]: 1", "part: removed: gone[1]: 2", "part: added: new: None"]
    assert list(files.differences("part", after)) == [
        *absent,
        "part: changed: kept / sha256: 'a' -> 'b'",
        "part: changed: kept / sum: 2.0 -> 2.01",
    ]
    stored = json.loads((tmp_path / "part.json").read_text("utf-8"))
    other = {**stored, "machine": {**stored["machine"], "cpu": "another"}}
    (tmp_path / "part.json").write_text(json.dumps(other), "utf-8")
    assert list(files.differences("part", after)) == absent
    after["kept"]["sum"] = 2.1
    assert list(files.differences("part", after))[3:] == [
        "part: changed: kept / sum: 2.0 -> 2.1",
    ]
