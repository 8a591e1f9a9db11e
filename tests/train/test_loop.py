"""Training loop: results and resuming."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.papers.synthetic import SHAPES
from pipeline import config
from pipeline.config import JobError
from pipeline.registry import ENCODERS
from pipeline.train.loop import Loop
from pipeline.train.spec import Optimiser
from tests.conftest import ROOT
from tests.train.runs import assert_same, logged, spec_of, trained, weights_of


def test_loss_decreases_and_model_loads_as_encoder(model, tmp_path):
    spec = spec_of(
        tmp_path / "run",
        model,
        data={
            "class": SHAPES,
            "num_scenes": 8,
            "fresh": False,
            "captions": 2,
            "validation": 8,
        },
        epochs=40,
        optimiser={"learning_rate": 5e-3, "warmup_ratio": 0},
        eval_every=20,
        checkpoint_every=100,
    )
    before = weights_of_model(model)
    after = trained(spec)
    losses = logged(tmp_path / "run", "loss")
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert any((before[name] != after[name]).any() for name in after)
    assert len(logged(tmp_path / "run", "R@1")) == 3  # before, between and after
    metadata = json.loads((tmp_path / "run" / "model" / "training.json").read_text("utf-8"))
    assert metadata["spec"] == config.dump(spec) and metadata["sha256"]
    made = {**config.dump(spec.learner.encoder), "model": str(tmp_path / "run" / "model")}
    encoder = ENCODERS.build(ENCODERS.resolve(made))
    assert encoder.fingerprint != ENCODERS.build(spec.learner.encoder).fingerprint
    assert encoder.encode_queries(["a red star"]).tokens.vectors.isfinite().all()


def weights_of_model(model):
    return weights_of(Path(model))


@pytest.mark.parametrize("symmetric", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_mini_batches_give_the_gradients_of_the_whole_batch(model, tmp_path, symmetric):
    learner = {"symmetric": symmetric, "learn_temperature": True}
    whole = trained(spec_of(tmp_path / "whole", model, learner))
    parts = trained(spec_of(tmp_path / "parts", model, learner, mini_batch_size=3))
    assert_same(whole, parts, atol=1e-4)
    losses = [logged(tmp_path / name, "loss") for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_accumulated_gradients_are_the_mean_over_batches(model, tmp_path):
    spec = spec_of(tmp_path / "run", model, gradient_accumulation_steps=3, epochs=1)
    loop = Loop(spec, say=lambda line: None)
    assert loop.num_steps == 1
    batches = list(loop.data.batches(0, 0, 0, 1))
    expected = {}
    for batch in batches:
        loop.learner.zero_grad()
        read = loop.learner.read(batch)
        loss, _ = loop.learner.loss(loop.learner(read), batch, loop.data)
        loss.backward()
        for name, parameter in loop.learner.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, 0) + parameter.grad / len(batches)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm().item()
    figures = loop._step([(batch, loop.learner.read(batch)) for batch in batches])
    assert figures["gradient_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """Weights after a run that was not interrupted."""
    return trained(spec_of(tmp_path_factory.mktemp("whole"), model))


@pytest.mark.parametrize(
    "stop",
    [1, pytest.param(2, marks=pytest.mark.heavy), 3, pytest.param(5, marks=pytest.mark.heavy)],
)
def test_resumed_run_equals_uninterrupted_run(model, whole, tmp_path, stop, monkeypatch):
    spec = spec_of(tmp_path / "broken", model)
    steps = []

    def breaking(self, batches):
        if len(steps) == stop:
            raise KeyboardInterrupt
        steps.append(self.step)
        return step(self, batches)

    step = Loop._step
    monkeypatch.setattr(Loop, "_step", breaking)
    with pytest.raises(KeyboardInterrupt):
        trained(spec)
    monkeypatch.setattr(Loop, "_step", step)
    assert not (tmp_path / "broken" / "model").exists()
    loop = Loop(spec, say=lambda line: None)
    assert loop.step == stop // 2 * 2  # at most one interval is done again
    assert_same(whole, trained(spec), atol=0)


def dropping(model: str, folder: Path) -> str:
    """A copy of a tiny ColPali whose language model has dropout."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings["vlm_config"]["text_config"]["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("learner", "model_drops", "activation_checkpointing"),
    [
        ({"trainable": "all"}, True, True),
        ({"trainable": "projection"}, False, False),
        ({"trainable": "lora", "lora": {"rank": 2, "alpha": 4, "dropout": 0.5}}, False, False),
    ],
    ids=["all", "projection", "lora"],
)
def test_dropout_is_active_only_in_training(
    model, tmp_path, learner, model_drops, activation_checkpointing
):
    with_dropout = dropping(model, tmp_path / "model")
    spec = spec_of(
        tmp_path / "run", with_dropout, learner, activation_checkpointing=activation_checkpointing
    )
    loop = Loop(spec, say=lambda line: None)
    batch = next(loop.data.batches(0, 0, 0, 1))
    modes = []

    def vectors():
        # The matrices begin as zeros, behind which dropout is not seen.
        with torch.no_grad():
            for name, parameter in loop.learner.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        return loop.learner(loop.learner.read(batch))["document_vectors"].detach()

    def evaluating(validation, data):
        modes.append((loop.learner.training, torch.equal(vectors(), vectors())))
        return {"R@1": np.zeros(1)}

    loop.learner.evaluate = evaluating
    is_random = learner["trainable"] != "projection"
    assert torch.equal(vectors(), vectors()) != is_random
    loop._evaluate()
    assert modes == [(False, True)]
    assert torch.equal(vectors(), vectors()) != is_random
    attention = [m for n, m in loop.learner.model.named_modules() if n.endswith("self_attn")]
    assert attention and {m.training for m in attention} == {model_drops}
    dropouts = [m for m in loop.learner.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert all(m.training for m in dropouts) or learner["trainable"] == "projection"


@pytest.mark.parametrize(
    "learner",
    [
        pytest.param({"trainable": "all"}, marks=pytest.mark.heavy),
        {"trainable": "lora", "lora": {"rank": 2, "alpha": 4, "dropout": 0.5}},
    ],
    ids=["all", "lora"],
)
def test_run_with_dropout_resumes_exactly(model, tmp_path, learner, monkeypatch):
    """Also with measurements, which draw nothing, and parts, which draw twice the same."""
    with_dropout = dropping(model, tmp_path / "model")
    less = {"mini_batch_size": 4, "max_steps": 4}
    more = {**less, "eval_every": 2}
    whole = trained(spec_of(tmp_path / "whole", with_dropout, learner, **more))
    without = trained(spec_of(tmp_path / "without", with_dropout, learner, **less))
    assert_same(whole, without, atol=0)
    spec, step = spec_of(tmp_path / "broken", with_dropout, learner, **more), Loop._step

    def breaking(self, batches):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, batches)

    monkeypatch.setattr(Loop, "_step", breaking)
    with pytest.raises(KeyboardInterrupt):
        trained(spec)
    monkeypatch.setattr(Loop, "_step", step)
    assert_same(whole, trained(spec), atol=0)


def test_finished_run_is_not_repeated(model, tmp_path):
    spec = spec_of(tmp_path, model)
    first = trained(spec)
    assert len(logged(tmp_path, "loss")) == 6
    assert_same(first, trained(spec), atol=0)
    assert len(logged(tmp_path, "loss")) == 6


def test_non_finite_loss_aborts_with_the_step(model, tmp_path, monkeypatch):
    from pipeline.train import contrastive

    honest, calls = contrastive.info_nce, []

    def spoiled(scores, *more):
        calls.append(1)
        return honest(scores * (torch.nan if len(calls) == 4 else 1), *more)

    monkeypatch.setattr(contrastive, "info_nce", spoiled)
    with pytest.raises(
        JobError, match=r"step 4: non-finite loss \(nan\) .* good checkpoint is .*00000002"
    ):
        trained(spec_of(tmp_path, model))
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["step-00000002"]
    assert not (tmp_path / "model").exists()


@pytest.mark.heavy
def test_killed_process_resumes(model, tmp_path):
    whole = trained(spec_of(tmp_path / "whole", model, epochs=8))
    spec = spec_of(tmp_path / "killed", model, epochs=8)
    path = tmp_path / "spec.yaml"
    path.write_text(config.dump_yaml(spec), "utf-8")
    command = [sys.executable, "-m", "jobs.train", str(path), "--in-process"]
    alike = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here: sums of more threads round otherwise
    process = subprocess.Popen(command, cwd=ROOT, env=alike, stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step-0000000[4-9]")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "model").exists()
    assert_same(whole, trained(spec), atol=0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate_schedule(schedule):
    spec = Optimiser(learning_rate=2.0, warmup_ratio=0.2, schedule=schedule)
    rates = [spec.rate(step, 100) for step in range(100)]
    assert rates[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)])
    assert rates[20] == 2.0
    last = {"cosine": 0, "linear": 0, "constant": 2.0}[schedule]
    assert rates[-1] == pytest.approx(last, abs=0.03)
    assert Optimiser(warmup_ratio=0).rate(0, 1) == Optimiser().learning_rate


def test_exponential_schedule_decays_per_epoch_to_a_minimum():
    """EDJE, appendix A, with the interval of BLIP's public code."""
    spec = Optimiser(
        learning_rate=3e-4,
        warmup_steps=100,
        warmup_learning_rate=1e-6,
        schedule="exponential",
        decay_rate=0.9,
        min_learning_rate=1e-6,
    )
    rates = np.array([spec.rate(step, 60_000, 1000) for step in range(60_000)])
    warmup = [1e-6 + (3e-4 - 1e-6) * (step + 1) / 100 for step in range(100)]
    decayed = [max(1e-6, 3e-4 * 0.9 ** (step // 1000)) for step in range(100, 60_000)]
    np.testing.assert_allclose(rates, warmup + decayed, rtol=1e-12)
    assert rates[-1] == 1e-6 and rates[999] == 3e-4 and rates[1000] == pytest.approx(2.7e-4)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_minimum_learning_rate(schedule):
    spec = Optimiser(learning_rate=2.0, warmup_ratio=0, schedule=schedule, min_learning_rate=0.5)
    rates = [spec.rate(step, 100) for step in range(101)]
    assert rates[0] == 2.0 and rates[-1] == pytest.approx(0.5)
    assert rates[50] == pytest.approx(1.25)
