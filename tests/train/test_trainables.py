"""Classes of the values of `trainable`."""

from __future__ import annotations

from typing import get_args

import pytest

from pipeline.train.contrastive_spec import ContrastiveSpec
from pipeline.train.loop import Loop
from pipeline.train.trainables import TRAINABLES
from tests.train.runs import spec_of

#: Parts of the names of the trainable parameters by the value of `trainable`; empty: all names.
PARTS = {"all": "", "projection": "embedding_proj_layer", "lora": "lora_"}


def test_every_value_has_a_class():
    assert set(TRAINABLES) == set(get_args(ContrastiveSpec.model_fields["trainable"].annotation))


@pytest.mark.parametrize("trainable", PARTS)
def test_trainable_parameters(model, tmp_path, trainable):
    learner = Loop(
        spec_of(tmp_path, model, {"trainable": trainable}), say=lambda line: None
    ).learner
    is_trained = {name: p.requires_grad for name, p in learner.model.named_parameters()}
    assert is_trained == {name: PARTS[trainable] in name for name in is_trained}
    assert any(is_trained.values()) and not learner.log_scale.requires_grad
