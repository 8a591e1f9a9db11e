"""Converts the output folders of runs of earlier versions to the current names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import config
from pipeline.registry import LEARNERS, TRAINING_DATA
from pipeline.train.spec import VALIDATION, Optimiser, TrainSpec

#: Fields of `Optimiser` that earlier versions did not have, which had the effect of the defaults.
ADDED_FIELDS = {
    name: Optimiser.model_fields[name].default
    for name in ("warmup_steps", "warmup_learning_rate", "min_learning_rate", "decay_rate")
}
#: Former name of the folder `VALIDATION`.
FORMER_VALIDATION = "held_out"


def migrated_spec(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces former field names in the stored spec of a run by the current ones.

    Args:
        stored: Fields of a `TrainSpec` as JSON values. Some may be missing.

    >>> migrated_spec({"accumulate": 2, "optimiser": {"clip": None}})["optimiser"]["decay_rate"]
    0.9
    """
    spec = TrainSpec.with_present_names(stored)
    if "optimiser" in spec:
        # Fields that earlier versions did not have get their defaults.
        stored_optimiser = Optimiser.with_present_names(spec["optimiser"])
        spec["optimiser"] = {**ADDED_FIELDS, **stored_optimiser}
    for field, registry in (("learner", LEARNERS), ("data", TRAINING_DATA)):
        if field in spec:
            spec[field] = config.dump(registry.resolve(spec[field], stored=True))
    return spec


def migrate_folder(folder: Path) -> None:
    """Renames the validation metrics in the output folder of a run if they have a former name.

    Args:
        folder: Output folder of the run.
    """
    former, present = folder / FORMER_VALIDATION, folder / VALIDATION
    if former.is_dir() and not present.exists():
        former.rename(present)
