"""The shapes job, and maps of its scenes."""

from __future__ import annotations

import pytest

from examples.papers.verbs import shapes
from jobs import draw
from pipeline.config import SpecError


def test_each_series_has_different_scenes(tmp_path):
    for series in ("0", "1"):
        shapes.main([str(tmp_path / series), "--count", "2", "--series", series])
    for name in ("images/scene-00000.png", "queries.jsonl", "phrases.jsonl"):
        assert (tmp_path / "0" / name).read_bytes() != (tmp_path / "1" / name).read_bytes()
    with pytest.raises(SpecError, match="^series must be .*, got -1"):  # used for training
        shapes.main([str(tmp_path / "2"), "--series", "-1"])
    phrases = str(tmp_path / "0" / "phrases.jsonl")
    image = str(tmp_path / "a.png")
    with pytest.raises(SpecError, match="^index must be .*, got 'none'"):
        draw.main(["maps", phrases, image, "--index", "none"])
    # Reported before the index is opened.
    with pytest.raises(SpecError, match=r"^items must be the ids of .*, got \['other.png'\]$"):
        draw.main(["maps", phrases, image, "--index", "memory://none", "--items", "other.png"])
