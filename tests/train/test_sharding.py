"""Training on several workers, and with activations computed again."""

from __future__ import annotations

import shutil

import pytest

from examples.papers.synthetic import SHAPES
from pipeline.config import SpecError
from pipeline.train import sharding
from tests.train.runs import assert_same, logged, run_workers, spec_of, trained, weights_of


@pytest.mark.parametrize(
    ("learner", "more"),
    [
        # Covered by the case "sharded" and by the test of two Ray workers.
        pytest.param({"symmetric": True, "learn_temperature": True}, {}, marks=pytest.mark.heavy),
        pytest.param(
            {"compressor": {"name": "samer", "num_vectors": 4, "object_prior": True}},
            {},
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            {}, {"mini_batch_size": 3, "gradient_accumulation_steps": 3}, marks=pytest.mark.heavy
        ),
        ({"symmetric": True, "learn_temperature": True}, {"fsdp": True, "max_steps": 3}),
        pytest.param(
            {"trainable": "lora", "lora": {"rank": 4, "alpha": 8}},
            {"fsdp": True, "mini_batch_size": 3, "gradient_accumulation_steps": 3},
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            {
                "trainable": "lora",
                "lora": {"rank": 4, "alpha": 8, "targets": r".*(q_proj|embedding_proj_layer)"},
                "encoder": {
                    "name": "colpali",
                    "model": "{}",
                    "output_tokens": "visual",
                },  # in bfloat16
            },
            {"fsdp": True, "eval_every": 3},
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            {"trainable": "projection", "hidden_states_cache": "{}/states"},
            {
                "fsdp": True,
                "eval_every": 3,
                "data": {
                    "class": SHAPES,
                    "num_scenes": 24,
                    "fresh": False,
                    "validation": 12,
                },
            },
            marks=pytest.mark.heavy,
        ),
    ],
    ids=[
        *("both ways", "compressed", "parts and accumulated"),
        *("sharded", "lora, sharded", "lora on bfloat16, sharded", "projection, sharded"),
    ],
)
def test_two_workers_equal_one(model, tmp_path, learner, more):
    if "hidden_states_cache" in learner:
        folder = learner["hidden_states_cache"].format(tmp_path)
        learner = {**learner, "hidden_states_cache": folder}
    loss_atol, atol = 1e-5, 1e-4
    if "encoder" in learner:  # the base computes in bfloat16, which rounds by the batch
        learner = {**learner, "encoder": {**learner["encoder"], "model": model}}
        loss_atol, atol = 1e-2, 2e-2
    one = trained(spec_of(tmp_path / "one", model, learner, **more))
    two = spec_of(tmp_path / "two", model, learner, **more)
    run_workers(two, tmp_path, 2)
    losses = [logged(tmp_path / name, "loss") for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=loss_atol)
    assert_same(one, weights_of(tmp_path / "two" / "model"), atol=atol)


@pytest.mark.heavy
def test_fsdp_run_resumes_with_another_number_of_workers(model, tmp_path):
    """A checkpoint can be loaded on another number of workers."""
    whole = trained(spec_of(tmp_path / "whole", model))
    spec = spec_of(tmp_path / "run", model, fsdp=True)
    run_workers(spec, tmp_path, 2)
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert_same(whole, trained(spec), atol=1e-4)  # from step 4 on, alone
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    run_workers(spec, tmp_path, 2)
    assert_same(whole, weights_of(tmp_path / "run" / "model"), atol=1e-4)


def test_activation_checkpointing_gives_equal_weights(model, tmp_path, monkeypatch):
    plain = trained(spec_of(tmp_path / "plain", model))
    calls, honest = [], sharding.checkpoint
    counted = lambda *args, **kwargs: calls.append(1) or honest(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(sharding, "checkpoint", counted)
    assert_same(
        plain, trained(spec_of(tmp_path / "again", model, activation_checkpointing=True)), atol=1e-6
    )
    assert calls
    adapter = {"trainable": "adapter", "encoder": {"name": "minilm"}}
    with pytest.raises(SpecError, match="activation_checkpointing must be false .*, got True"):
        trained(spec_of(tmp_path / "adapter", model, adapter, activation_checkpointing=True))
