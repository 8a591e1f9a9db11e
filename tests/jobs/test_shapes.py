"""The shapes job, and maps of its scenes."""

from __future__ import annotations

import pytest

from jobs import maps, shapes
from pipeline.config import SpecError


def test_series_have_different_scenes(tmp_path):
    for series in ("0", "1"):
        shapes.main([str(tmp_path / series), "--count", "2", "--series", series])
    for name in ("images/scene-00000.png", "queries.jsonl", "phrases.jsonl"):
        assert (tmp_path / "0" / name).read_bytes() != (tmp_path / "1" / name).read_bytes()
    with pytest.raises(SpecError, match="^series must be .*-1"):  # those are trained on
        shapes.main([str(tmp_path / "2"), "--series", "-1"])
    phrases = str(tmp_path / "0" / "phrases.jsonl")
    picture = str(tmp_path / "a.png")
    with pytest.raises(SpecError, match="^index must be .*'none'"):
        maps.main([phrases, picture, "--index", "none"])
    with pytest.raises(SpecError, match="^items must be "):  # before the index is opened
        maps.main([phrases, picture, "--index", "memory://none", "--items", "other.png"])
