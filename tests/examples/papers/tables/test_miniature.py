"""Generated data and models of miniatures."""

from __future__ import annotations

import pytest

from examples.papers.tables.miniature import generate_data, generate_models
from examples.papers.tables.spec import load_data_sets
from examples.papers.verbs.run import PAPERS
from pipeline.config import SpecError


def test_only_required_data_are_generated_once(tmp_path):
    data_sets = load_data_sets(PAPERS)
    generate_data(["beir_arguana"], data_sets, tmp_path)
    assert [path.name for path in tmp_path.glob("*/*")] == ["arguana"]
    file = tmp_path / "beir/arguana/corpus.jsonl"
    before = file.stat().st_mtime_ns
    generate_data(["beir_arguana"], data_sets, tmp_path)
    assert file.stat().st_mtime_ns == before
    (tmp_path / "beir/arguana/queries.jsonl").unlink()
    generate_data(["beir_arguana"], data_sets, tmp_path)
    assert (tmp_path / "beir/arguana/queries.jsonl").exists()


def test_only_models_of_specs_are_generated(tmp_path):
    folder = tmp_path / "miniature"
    generate_models([{"models": [f"{folder}/models/bert/x", "data/y"]}], folder)
    assert [path.name for path in folder.glob("*/*")] == ["bert"]
    with pytest.raises(SpecError, match="path below miniature/ must be one of"):
        generate_models([f"{folder}/models/berta"], folder)
