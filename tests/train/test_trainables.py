"""Classes of the values of `trainable`."""

from __future__ import annotations

from typing import get_args

import pytest

from pipeline.encoders.trained import trained_fields
from pipeline.registry import ENCODERS
from pipeline.train.contrastive_spec import ContrastiveSpec
from pipeline.train.loop import Loop
from pipeline.train.trainables import TRAINABLES
from tests.images import make_images
from tests.peers import remake
from tests.train.runs import spec_of, trained

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


@pytest.mark.parametrize("layout", ["base", "adapter"])
@pytest.mark.parametrize("trainable", PARTS)
def test_models_of_colpali_engine_are_trained_saved_and_loaded(trainable, layout, tmp_path):
    encoder = {"name": "colpali", "dtype": "float32"}
    encoder["model"] = str(remake.checkpoint("colqwen2_5", tmp_path) / layout)
    learner = {"trainable": trainable, "encoder": encoder}
    if trainable == "lora":
        learner["lora"] = {"rank": 4, "alpha": 8}
    trained(spec_of(tmp_path / "run", encoder["model"], learner, epochs=1))
    fields = trained_fields(encoder, trainable, str(tmp_path / "run/model"))
    after = ENCODERS.resolve({**encoder, **{k: v for k, v in fields.items() if v is not None}})
    ENCODERS.load("colpali").check(after)
    _, items = make_images((40, 40))
    vectors = []
    for spec in (ENCODERS.resolve(encoder), after):
        ((_, batch),) = ENCODERS.build(spec).encode(items)
        vectors.append(batch.vectors)
    assert 1e-3 < (vectors[1] - vectors[0]).abs().max() < 1
