"""Tests that the resource profiles are valid."""

from __future__ import annotations

import pytest

from pipeline import config
from pipeline.index.recompress import RecompressResources
from pipeline.index.spec import IndexResources
from pipeline.search.candidates_job import CandidatesResources
from pipeline.train.ray import Workers
from tests.conftest import ROOT

PROFILES = ROOT / "cluster/profiles"
#: Profiles of other jobs than `jobs.index`.
SPECS = {
    "autoscaling_candidates": CandidatesResources,
    "autoscaling_recompress": RecompressResources,
    "recompress": RecompressResources,
    "train_gpus": Workers,
}


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_profile_is_valid(path):
    profile = config.load(SPECS.get(path.stem, IndexResources), str(path), role="resources")
    assert config.dump(profile) != config.dump(type(profile)())
