"""Tests of the plan of the chaos suite."""

from __future__ import annotations

import pytest

from pipeline.config import SpecError
from tests.chaos.faults import (
    DEFAULT_TARGETS,
    EARLY_FAULTS,
    NODE_TARGETS,
    PHASES,
    ROUND_FAULTS,
    TARGETS,
    plan,
    rounds,
)


def test_plan_covers_every_target_of_every_phase():
    faults = plan(200, 0, PHASES)
    assert [fault.number for fault in faults] == list(range(200))
    pairs = {(phase, target) for phase in PHASES for target in TARGETS[phase]}
    assert {(fault.phase, fault.target) for fault in faults} == pairs
    assert plan(200, 0, PHASES) == faults != plan(200, 1, PHASES)


def test_plan_omits_targets_that_are_not_available():
    faults = plan(100, 0, ["listing", "maintain"], without=NODE_TARGETS)
    assert {fault.phase for fault in faults} == {"listing", "maintain"}
    assert not {fault.target for fault in faults} & set(NODE_TARGETS)


def test_partitions_are_not_a_default():
    assert set(TARGETS["encoding"]) - set(DEFAULT_TARGETS) == {"network"}


def test_phases_without_an_available_target_are_rejected():
    others = {target for target in TARGETS["encoding"] if target != "network"}
    with pytest.raises(SpecError, match="--phases"):
        plan(1, 0, ["maintain"], without={*TARGETS["maintain"], *others})


def test_rounds_contain_each_fault_once():
    faults = plan(200, 0, PHASES)
    divided = rounds(faults, 0)
    assert sorted(fault.number for chosen in divided for fault in chosen) == list(range(200))
    assert all(len(chosen) == 1 for chosen in rounds(faults, 0, 1))
    for chosen in divided:
        assert len({fault.job for fault in chosen}) == 1 and len(chosen) <= ROUND_FAULTS
        early = [fault.is_early for fault in chosen]
        assert sum(early) <= EARLY_FAULTS and early == sorted(early, reverse=True)
