"""Benchmarks of all collections."""

from __future__ import annotations

import pytest

from pipeline.config import SpecError
from tests.datasets.loading import load


def test_a_missing_file_is_named(tmp_path):
    for name, fields in {
        "multivent": {"judgments": "j"},
        "msrvtt": {},
        "karpathy": {},
        "imagecode": {},
        "mmeb": {},
        "vidore": {},
    }.items():
        absent = str(tmp_path / "absent.csv")
        with pytest.raises(SpecError, match=r"benchmark\.path .*absent\.csv.*does not exist"):
            load(name, path=absent, **fields)
