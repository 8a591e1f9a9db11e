"""Float32 master weights."""

from __future__ import annotations

import pytest
import torch

from pipeline import config
from pipeline.registry import ENCODERS
from pipeline.train import sharding
from pipeline.train.loop import Loop
from tests.train.runs import spec_of, weights_of


@pytest.mark.parametrize(
    "learner",
    [
        {"trainable": "all"},
        {"trainable": "projection"},
        {"trainable": "lora", "lora": {"rank": 2, "alpha": 4}},
    ],
    ids=lambda learner: learner["trainable"],
)
def test_trained_weights_are_float32(model, tmp_path, learner):
    """Updates that bfloat16 would round away; what is saved has the dtype of the spec."""
    encoder = {
        "name": "colpali",
        "model": model,
        "output_tokens": "visual",
    }  # bfloat16, the default
    rate = {"learning_rate": 1e-5, "warmup_ratio": 0, "weight_decay": 0}
    spec = spec_of(
        tmp_path,
        model,
        {**learner, "encoder": encoder},
        optimiser=rate,
        eval_every=3,
        max_steps=4,
    )
    loop = Loop(spec, say=lambda line: None)
    before = {name: p.clone() for name, p in loop.learner.named_parameters() if p.requires_grad}
    frozen = {p.dtype for p in loop.learner.model.parameters() if not p.requires_grad}
    assert frozen == ({torch.bfloat16} if learner["trainable"] != "all" else set())
    loop.run()
    states = [tensor for state in loop.optimiser.state.values() for tensor in state.values()]
    assert {tensor.dtype for tensor in [*before.values(), *states]} == {torch.float32}
    after = dict(loop.learner.named_parameters())
    trained_names = [name for name in before if after[name].grad is not None]
    assert trained_names and all((before[n] != after[n]).any() for n in trained_names)
    is_lora = learner["trainable"] == "lora"
    saved = {tensor.dtype for tensor in weights_of(tmp_path / "model").values()}
    assert saved == {torch.float32 if is_lora else torch.bfloat16}
    field = {"all": "model", "projection": "projection", "lora": "adapter"}[learner["trainable"]]
    made = {**config.dump(spec.learner.encoder), field: str(tmp_path / "model")}
    read_back = ENCODERS.build(ENCODERS.resolve(made)).model.state_dict()
    if not is_lora:  # whose matrices are merged
        with sharding.as_loaded(loop.learner, loop._dtypes):
            for name, tensor in loop.learner.model.state_dict().items():
                assert torch.equal(tensor, read_back[name]), name
    assert {p.dtype for p in after.values() if p.requires_grad} == {torch.float32}
