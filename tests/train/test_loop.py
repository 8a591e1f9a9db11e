"""The loop: what it computes, and that it goes on where it was stopped."""

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

from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.registry import ENCODERS
from pipeline.synthetic import tiny
from pipeline.train import masters, sharding
from pipeline.train.checkpoints import replace, undo_half
from pipeline.train.loop import Loop, Optimiser
from tests.conftest import ROOT
from tests.train.runs import assert_same, logged, spec_of, trained, weights_of


@pytest.fixture(scope="module")
def model(checkpoint) -> str:
    return checkpoint("colpali")


def test_the_loss_falls_and_the_model_is_an_encoder(model, tmp_path):
    spec = spec_of(
        tmp_path / "run",
        model,
        data={"name": "shapes", "num_scenes": 8, "fresh": False, "captions": 2, "held_out": 8},
        epochs=40,
        optimiser={"learning_rate": 5e-3, "warmup": 0},
        evaluate_every=20,
        checkpoint_every=100,
    )
    before = weights_of_model(model)
    after = trained(spec)
    losses = logged(tmp_path / "run", "loss")
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert any((before[name] != after[name]).any() for name in after)
    assert len(logged(tmp_path / "run", "R@1")) == 3  # before, between and after
    about = json.loads((tmp_path / "run" / "model" / "training.json").read_text("utf-8"))
    assert about["spec"] == config.dump(spec) and about["sha256"]
    made = {**config.dump(spec.learner.encoder), "model": str(tmp_path / "run" / "model")}
    encoder = ENCODERS.build(ENCODERS.resolve(made))
    assert encoder.fingerprint != ENCODERS.build(spec.learner.encoder).fingerprint
    assert encoder.encode_queries(["a red star"]).tokens.vectors.isfinite().all()


def weights_of_model(model):
    return weights_of(Path(model))


@pytest.mark.parametrize("symmetric", [False, True])
def test_parts_of_a_batch_give_the_gradients_of_the_whole(model, tmp_path, symmetric):
    learner = {"symmetric": symmetric, "learn_temperature": True}
    whole = trained(spec_of(tmp_path / "whole", model, learner))
    parts = trained(spec_of(tmp_path / "parts", model, learner, part_size=3))
    assert_same(whole, parts, atol=1e-4)
    losses = [logged(tmp_path / name, "loss") for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_batches_that_are_accumulated_give_the_mean_of_their_gradients(model, tmp_path):
    spec = spec_of(tmp_path / "run", model, accumulate=3, epochs=1)
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


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_run_that_was_stopped_ends_as_an_unbroken_one(model, tmp_path, stop, monkeypatch):
    whole = trained(spec_of(tmp_path / "whole", model))
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


@pytest.mark.parametrize(
    "learner",
    [
        {"trains": "all"},
        {"trains": "projection"},
        {"trains": "lora", "lora": {"rank": 2, "alpha": 4}},
    ],
    ids=lambda learner: learner["trains"],
)
def test_what_is_trained_is_float32_whatever_the_model_was_loaded_in(model, tmp_path, learner):
    """Updates that bfloat16 would round away; what is saved has the dtype of the spec."""
    encoder = {"name": "colpali", "model": model, "keep": "visual"}  # bfloat16, the default
    rate = {"learning_rate": 1e-5, "warmup": 0, "weight_decay": 0}
    spec = spec_of(
        tmp_path,
        model,
        {**learner, "encoder": encoder},
        optimiser=rate,
        evaluate_every=3,
        max_steps=4,
    )
    loop = Loop(spec, say=lambda line: None)
    before = {name: p.clone() for name, p in loop.learner.named_parameters() if p.requires_grad}
    frozen = {p.dtype for p in loop.learner.model.parameters() if not p.requires_grad}
    assert frozen == ({torch.bfloat16} if learner["trains"] != "all" else set())
    loop.run()
    states = [own for state in loop.optimiser.state.values() for own in state.values()]
    assert {own.dtype for own in [*before.values(), *states]} == {torch.float32}
    after = dict(loop.learner.named_parameters())
    trained_names = [name for name in before if after[name].grad is not None]
    assert trained_names and all((before[n] != after[n]).any() for n in trained_names)
    is_lora = learner["trains"] == "lora"
    saved = {tensor.dtype for tensor in weights_of(tmp_path / "model").values()}
    assert saved == {torch.float32 if is_lora else torch.bfloat16}
    field = {"all": "model", "projection": "projection", "lora": "adapter"}[learner["trains"]]
    made = {**config.dump(spec.learner.encoder), field: str(tmp_path / "model")}
    read_back = ENCODERS.build(ENCODERS.resolve(made)).model.state_dict()
    if not is_lora:  # whose matrices are merged
        with masters.as_loaded(loop.learner, loop._dtypes):
            for name, tensor in loop.learner.model.state_dict().items():
                assert torch.equal(tensor, read_back[name]), name
    assert {p.dtype for p in after.values() if p.requires_grad} == {torch.float32}


def dropping(model: str, folder: Path) -> str:
    """A copy of a tiny ColPali whose language model has dropout."""
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings["vlm_config"]["text_config"]["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    return str(folder)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("learner", "model_drops"),
    [
        ({"trains": "all"}, True),
        ({"trains": "projection"}, False),
        ({"trains": "lora", "lora": {"rank": 2, "alpha": 4, "dropout": 0.5}}, False),
    ],
    ids=["all", "projection", "lora"],
)
def test_dropout_is_on_in_training_alone(model, tmp_path, learner, model_drops, recompute):
    with_dropout = dropping(model, tmp_path / "model")
    spec = spec_of(tmp_path / "run", with_dropout, learner, recompute=recompute)
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

    def evaluating(held_out, data):
        modes.append((loop.learner.training, torch.equal(vectors(), vectors())))
        return {"R@1": np.zeros(1)}

    loop.learner.evaluate = evaluating
    is_random = learner["trains"] != "projection"
    assert torch.equal(vectors(), vectors()) != is_random
    loop._evaluate()
    assert modes == [(False, True)]
    assert torch.equal(vectors(), vectors()) != is_random
    attention = [m for n, m in loop.learner.model.named_modules() if n.endswith("self_attn")]
    assert attention and {m.training for m in attention} == {model_drops}
    dropouts = [m for m in loop.learner.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert all(m.training for m in dropouts) or learner["trains"] == "projection"


@pytest.mark.parametrize(
    "learner",
    [
        pytest.param({"trains": "all"}, marks=pytest.mark.heavy),
        {"trains": "lora", "lora": {"rank": 2, "alpha": 4, "dropout": 0.5}},
    ],
    ids=["all", "lora"],
)
def test_a_run_with_dropout_goes_on_where_it_was(model, tmp_path, learner, monkeypatch):
    """Also with measurements, which draw nothing, and parts, which draw twice the same."""
    with_dropout = dropping(model, tmp_path / "model")
    less = {"part_size": 4, "max_steps": 4}
    more = {**less, "evaluate_every": 2}
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


def test_a_finished_run_is_not_done_again(model, tmp_path):
    spec = spec_of(tmp_path, model)
    first = trained(spec)
    assert len(logged(tmp_path, "loss")) == 6
    assert_same(first, trained(spec), atol=0)
    assert len(logged(tmp_path, "loss")) == 6


def test_the_checkpoint_of_another_run_is_refused(model, tmp_path):
    trained(spec_of(tmp_path, model))
    with pytest.raises(SpecError, match="seed: 1 .* 0, that of the checkpoint"):
        trained(spec_of(tmp_path, model, seed=1))
    with pytest.raises(SpecError, match=r"learner.temperature: 0.2"):
        trained(spec_of(tmp_path, model, {"temperature": 0.2}))
    trained(spec_of(tmp_path, model, log_every=5))  # changes nothing that is learned


def test_the_checkpoint_of_another_backbone_is_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint("colpali"), tmp_path / "model")
    spec = spec_of(tmp_path / "run", str(tmp_path / "model"))
    trained(spec)
    shutil.rmtree(tmp_path / "model")
    tiny.colpali(tmp_path / "model")
    with pytest.raises(SpecError, match=r"output: .* has a checkpoint of another .* is of"):
        trained(spec)


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_step(model, tmp_path, monkeypatch):
    from pipeline.train import contrastive

    honest, calls = contrastive.info_nce, []

    def spoiled(scores, positive, temperature):
        calls.append(1)
        return honest(scores * (torch.nan if len(calls) == 4 else 1), positive, temperature)

    monkeypatch.setattr(contrastive, "info_nce", spoiled)
    with pytest.raises(JobError, match=r"step 4: the loss is nan .* good checkpoint is .*00000002"):
        trained(spec_of(tmp_path, model))
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["step-00000002"]
    assert not (tmp_path / "model").exists()


def test_the_newest_checkpoints_are_kept(model, tmp_path):
    trained(spec_of(tmp_path, model, checkpoint_every=1, keep=2))
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["step-00000005", "step-00000006"]


WORKER = """
import os, sys, torch.distributed as dist
from pipeline import config
from pipeline.train.loop import Loop, TrainSpec
dist.init_process_group("gloo")
spec = config.load(TrainSpec, sys.argv[1])
Loop(spec, say=lambda line: None).run()
dist.destroy_process_group()
"""


def run_workers(spec, folder, num_workers: int) -> None:
    """A run in processes that find each other as those of torchrun do."""
    path = folder / "spec.yaml"
    path.write_text(config.dump_yaml(spec), "utf-8")
    port = str(29600 + os.getpid() % 1000)
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_workers)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            cwd=ROOT,
            env={**os.environ, **about, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(num_workers)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0] * num_workers


@pytest.mark.parametrize(
    ("learner", "more"),
    [
        ({"symmetric": True, "learn_temperature": True}, {}),
        pytest.param(
            {"compressor": {"name": "samer", "num_vectors": 4, "object_prior": True}},
            {},
            marks=pytest.mark.heavy,
        ),
        pytest.param({}, {"part_size": 3, "accumulate": 3}, marks=pytest.mark.heavy),
        ({"symmetric": True, "learn_temperature": True}, {"shard": True, "evaluate_every": 3}),
        pytest.param(
            {"trains": "lora", "lora": {"rank": 4, "alpha": 8}},
            {"shard": True, "part_size": 3, "accumulate": 3},
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            {
                "trains": "lora",
                "lora": {"rank": 4, "alpha": 8, "targets": r".*(q_proj|embedding_proj_layer)"},
                "encoder": {"name": "colpali", "model": "{}", "keep": "visual"},  # in bfloat16
            },
            {"shard": True, "evaluate_every": 3},
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            {"trains": "projection", "states": "{}/states"},
            {
                "shard": True,
                "evaluate_every": 3,
                "data": {"name": "shapes", "num_scenes": 24, "fresh": False, "held_out": 12},
            },
            marks=pytest.mark.heavy,
        ),
    ],
    ids=[
        *("both ways", "compressed", "parts and accumulated"),
        *("sharded", "lora, sharded", "lora on bfloat16, sharded", "projection, sharded"),
    ],
)
def test_two_workers_learn_what_one_does(model, tmp_path, learner, more):
    if "states" in learner:
        learner = {**learner, "states": learner["states"].format(tmp_path)}
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
def test_a_sharded_run_goes_on_with_other_workers(model, tmp_path):
    """Of a checkpoint it does not matter on how many workers it was written."""
    whole = trained(spec_of(tmp_path / "whole", model))
    spec = spec_of(tmp_path / "run", model, shard=True)
    run_workers(spec, tmp_path, 2)
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert_same(whole, trained(spec), atol=1e-4)  # from step 4 on, alone
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    run_workers(spec, tmp_path, 2)
    assert_same(whole, weights_of(tmp_path / "run" / "model"), atol=1e-4)


def test_activations_that_are_computed_again_give_the_same(model, tmp_path, monkeypatch):
    kept = trained(spec_of(tmp_path / "kept", model))
    calls, honest = [], sharding.checkpoint
    counted = lambda *args, **kwargs: calls.append(1) or honest(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(sharding, "checkpoint", counted)
    assert_same(kept, trained(spec_of(tmp_path / "again", model, recompute=True)), atol=1e-6)
    assert calls
    adapter = {"trains": "adapter", "encoder": {"name": "minilm"}}
    with pytest.raises(SpecError, match="recompute: True is not legal; legal: false"):
        trained(spec_of(tmp_path / "adapter", model, adapter, recompute=True))


def test_figures_are_lines_and_events(model, tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    trained(spec_of(tmp_path, model, evaluate_every=3))
    events = []
    for path in (tmp_path / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:  # the length in 8 bytes, its checksum in 4, the event, its checksum in 4
            length = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    shown = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    for name in ("loss", "learning_rate", "R@1"):
        own = name.replace("@", "_")  # as TensorBoard wants it
        of_name = [value for (_, tag), value in sorted(shown.items()) if tag == own]
        assert of_name and of_name == pytest.approx(logged(tmp_path, name))


def test_what_was_about_to_be_replaced_is_there_again(tmp_path):
    (tmp_path / ".best.old").mkdir()  # killed between two renamings
    (tmp_path / "new").mkdir()
    (tmp_path / ".best.old" / "good").touch()
    undo_half(tmp_path / "best")
    assert (tmp_path / "best" / "good").exists() and not (tmp_path / ".best.old").exists()
    replace(tmp_path / "new", tmp_path / "best")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]
    assert not list((tmp_path / "best").iterdir())


def test_a_killed_process_goes_on(model, tmp_path):
    whole = trained(spec_of(tmp_path / "whole", model, epochs=8))
    spec = spec_of(tmp_path / "killed", model, epochs=8)
    path = tmp_path / "spec.yaml"
    path.write_text(config.dump_yaml(spec), "utf-8")
    command = [sys.executable, "-m", "jobs.train", str(path)]
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
    subprocess.run(command, cwd=ROOT, env=alike, check=True, stdout=subprocess.DEVNULL, timeout=120)
    assert_same(whole, weights_of(tmp_path / "killed" / "model"), atol=0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_learning_rate_rises_and_falls(schedule):
    spec = Optimiser(learning_rate=2.0, warmup=0.2, schedule=schedule)
    rates = [spec.rate(step, 100) for step in range(100)]
    assert rates[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)])
    assert rates[20] == 2.0
    last = {"cosine": 0, "linear": 0, "constant": 2.0}[schedule]
    assert rates[-1] == pytest.approx(last, abs=0.03)
    assert Optimiser(warmup=0).rate(0, 1) == Optimiser().learning_rate
