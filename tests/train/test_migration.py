"""Runs of earlier versions: their specs and folders have former names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

from pipeline import config
from pipeline.config import SpecError
from pipeline.registry import LEARNERS, TRAINING_DATA
from pipeline.train.migration import migrated_spec
from pipeline.train.spec import Optimiser, TrainSpec
from tests.train.runs import assert_same, spec_of, trained, weights_of


def with_former_names(spec: TrainSpec) -> dict[str, Any]:
    """The resolved spec as earlier versions stored it."""

    def renamed(fields: Mapping[str, Any], spec_class: type[config.Spec]) -> dict[str, Any]:
        former = {new: old for old, new in spec_class.renamed.items()}
        return {former.get(name, name): value for name, value in fields.items()}

    stored = renamed(config.dump(spec), TrainSpec)
    stored["optimiser"] = renamed(stored["optimiser"], Optimiser)
    stored["learner"] = renamed(stored["learner"], LEARNERS.spec_class(spec.learner.name))
    stored["data"] = renamed(stored["data"], TRAINING_DATA.spec_class(spec.data.name))
    return stored


def test_run_of_an_earlier_version_resumes(model, tmp_path):
    spec = spec_of(tmp_path, model, {"trainable": "projection"}, eval_every=2)
    weights = trained(spec)
    validation = tmp_path / "validation"
    for folder in (tmp_path / "model", tmp_path / "checkpoints" / "step-00000006"):
        shutil.rmtree(folder)
    stored = with_former_names(spec)
    assert stored["learner"]["trains"] == "projection" and stored["data"]["held_out"] == 12
    assert stored["accumulate"] == 1 and stored["optimiser"]["clip"] == 1
    path = tmp_path / "checkpoints" / "step-00000004" / "metadata.json"
    lasting = json.loads(path.read_text("utf-8"))["spec"]
    assert migrated_spec(stored) == config.dump(spec)
    assert lasting == {name: migrated_spec(stored)[name] for name in lasting}
    path.with_name("about.json").write_text(json.dumps({"step": 4, "spec": stored}), "utf-8")
    path.unlink()
    validation.rename(tmp_path / "held_out")

    assert_same(trained(spec), weights, atol=0)
    assert weights_of(tmp_path / "model").keys() == weights.keys()
    assert len(list(validation.glob("step-*.npz"))) == 4  # before training, and steps 2 to 6
    assert not (tmp_path / "held_out").exists()


@pytest.mark.parametrize(
    ("learner", "more", "old", "new"),
    [
        ({}, {"part_size": 4}, "part_size", "mini_batch_size"),
        ({}, {"accumulate": 2}, "accumulate", "gradient_accumulation_steps"),
        ({}, {"recompute": True}, "recompute", "activation_checkpointing"),
        ({}, {"shard": True}, "shard", "fsdp"),
        ({}, {"evaluate_every": 2}, "evaluate_every", "eval_every"),
        ({}, {"keep": 1}, "keep", "keep_last"),
        ({}, {"optimiser": {"clip": 1.0}}, "optimiser.clip", "max_grad_norm"),
        ({}, {"optimiser": {"warmup": 0.1}}, "optimiser.warmup", "warmup_ratio"),
        ({}, {"data": {"name": "shapes", "held_out": 2}}, "data.held_out", "validation"),
        ({"trains": "lora"}, {}, "learner.trains", "trainable"),
        ({"states": "folder"}, {}, "learner.states", "hidden_states_cache"),
        ({"name": "edje", "start": "folder"}, {}, "learner.start", "init_from"),
        ({"name": "edje", "masked": 0.5}, {}, "learner.masked", "mask_probability"),
        ({"name": "edje", "pairs_at_once": 8}, {}, "learner.pairs_at_once", "pair_mini_batch_size"),
    ],
)
def test_error_names_the_new_field(tmp_path, learner, more, old, new):
    spec = {"name": "test", "output": str(tmp_path), "data": "shapes", **more}
    given = {"name": "contrastive", "encoder": "minilm", **learner}
    with pytest.raises(SpecError) as raised:
        config.parse(TrainSpec, {**spec, "learner": given})
    assert raised.value.field == old and new in str(raised.value)
