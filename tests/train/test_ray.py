"""The loop under Ray Train, on real workers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from examples.papers.studies.study import StudySpec
from examples.papers.verbs import study as study_job
from jobs import train as job
from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.train.loop import Loop
from pipeline.train.ray import PROGRESS, Workers, default_workers, train
from pipeline.train.spec import TrainSpec
from tests.conftest import start_job
from tests.train.runs import assert_same, logged, spec_of, trained, weights_of

STARTED = "started 1 worker"


def run_of(spec: TrainSpec) -> dict[str, TrainSpec]:
    return {spec.name: spec}


def results(folder: Path) -> list[dict]:
    """The lines of `metrics.jsonl` without times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    times = ("seconds", "documents_per_second")
    return [{name: row[name] for name in row if name not in times} for row in rows]


def assert_same_runs(one: Path, other: Path) -> None:
    """Asserts that the metrics, the last checkpoint and the weights are bit-identical."""
    assert results(one) == results(other)
    for name in ("model", "best"):
        assert_same(weights_of(one / name), weights_of(other / name), atol=0)
    for name in ("weights.pt", "optimiser.pt", "random-0.pt"):
        last, same = (max((run / "checkpoints").glob("step-*")) for run in (one, other))
        assert last.name == same.name
        torch.testing.assert_close(
            torch.load(last / name, weights_only=True),
            torch.load(same / name, weights_only=True),
            atol=0,
            rtol=0,
        )


def test_ray_and_this_process_train_alike(cluster, model, tmp_path, capsys, monkeypatch):
    """Also if a run resumes on Ray that was interrupted in this process."""
    run = spec_of(tmp_path / "here", model, max_steps=3, eval_every=2, checkpoint_every=1)
    study = config.parse(StudySpec, {**config.dump(run), "sweep": {"seed": [0, 1]}})
    path = str(tmp_path / "spec.yaml")
    Path(path).write_text(config.dump_yaml(study), "utf-8")
    study_job.main([path, "--in-process"])
    assert "start Ray" not in capsys.readouterr().out

    step = Loop._step

    def breaking(self, batches):
        if self.step == 2:
            raise KeyboardInterrupt
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", breaking)
        with pytest.raises(KeyboardInterrupt):
            second = ["sweep={}", "seed=1", f"output={tmp_path}/ray/seed-1"]
            study_job.main([path, *second, "--in-process"])
    capsys.readouterr()
    study_job.main([path, f"output={tmp_path}/ray"])
    output = capsys.readouterr().out
    assert output.count(STARTED) == 1  # for both runs
    assert "run 2 of 2: seed 1" in output and "± " in output
    resumed = output.partition("run 2 of 2")[2]
    assert "step 3/3" in resumed and "step 2/3" not in resumed
    for name in ("seed-0", "seed-1"):
        assert_same_runs(tmp_path / "here" / name, tmp_path / "ray" / name)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGINT, 130, "error: interrupted\n"),
    ],
)
def test_stopped_ray_run_resumes_in_process(model, tmp_path, number, code, message):
    """The job starts its own Ray cluster."""
    more = {"epochs": 8, "eval_every": 50}
    trained(spec_of(tmp_path / "whole", model, **more))
    spec = spec_of(tmp_path / "stopped", model, **more)
    (tmp_path / "spec.yaml").write_text(config.dump_yaml(spec), "utf-8")
    process = start_job("jobs.train", f"{tmp_path}/spec.yaml", OMP_NUM_THREADS="1")
    deadline = time.monotonic() + 240
    while not list((tmp_path / "stopped" / "checkpoints").glob("step-0000000[4-9]")):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, message), output
    assert not (tmp_path / "stopped" / "model").exists()
    job.main([f"{tmp_path}/spec.yaml", "--in-process"])
    for name in ("model", "best"):
        one, other = (weights_of(tmp_path / run / name) for run in ("whole", "stopped"))
        assert_same(one, other, atol=0)


def test_default_is_one_worker_with_the_resources_of_this_process(monkeypatch):
    def node(is_alive=True, **resources):
        return {"Alive": is_alive, "Resources": resources}

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert default_workers([node(CPU=8.0)]) == Workers(num_cpus=4)
    assert default_workers([node(CPU=2.0), node(CPU=3.0), node(False, CPU=9.0)]).num_cpus == 3
    assert default_workers([node()]) == Workers(num_cpus=1)
    nodes = [node(CPU=8.0), node(CPU=2.0, GPU=4.0)]
    for is_built, expected in (
        (True, Workers(num_cpus=2, num_gpus=1)),
        (False, Workers(num_cpus=4)),
    ):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda is_built=is_built: is_built)
        assert default_workers(nodes) == expected


def test_invalid_runs_fail_before_ray_starts(model, tmp_path):
    spec = spec_of(tmp_path / "run", model, epochs=1)
    trained(spec)
    (tmp_path / "spec.yaml").write_text(config.dump_yaml(spec), "utf-8")
    (tmp_path / "workers.yaml").write_text("num_workers: 3\n", "utf-8")
    path, resources = f"{tmp_path}/spec.yaml", ("--resources", f"{tmp_path}/workers.yaml")
    with pytest.raises(SpecError, match="seed must be 0 as in the checkpoint .*, got 1"):
        job.main([path, "seed=1"])
    with pytest.raises(SpecError, match="batch_size must be a multiple of num_workers=3, got 8"):
        job.main([path, *resources])
    with pytest.raises(SpecError, match="--resources must be omitted with --in-process, got"):
        job.main([path, *resources, "--in-process"])


@pytest.mark.heavy
def test_two_ray_workers_equal_one_process(cluster, model, tmp_path):
    here = trained(spec_of(tmp_path / "here", model))
    spec = spec_of(tmp_path / "ray", model)
    lines = []
    train(run_of(spec), Workers(num_workers=2), lines.append)
    lines = [line for line in lines if not line.startswith("waiting")]  # on a busy machine
    assert lines[:2] == ["start 2 workers with 1 CPU each", "started 2 workers"]
    assert [line.split(":")[0] for line in lines[2:-1]] == [f"step {n}/6" for n in range(1, 7)]
    losses = [logged(tmp_path / name, "loss") for name in ("here", "ray")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    assert_same(here, weights_of(tmp_path / "ray" / "model"), atol=1e-4)


@pytest.mark.heavy
def test_worker_error_is_reported(cluster, model, tmp_path):
    """Without a restart, after which it would only repeat."""
    trained(spec_of(tmp_path, model, epochs=1))
    with pytest.raises(SpecError, match="seed must be .* as in the checkpoint .*, got 1"):
        train(run_of(spec_of(tmp_path, model, epochs=1, seed=1)), Workers())
    assert (tmp_path / PROGRESS).read_text("utf-8").count(STARTED) == 1


@pytest.mark.heavy
def test_killed_worker_restarts_and_resumes(cluster, model, tmp_path):
    whole = trained(spec_of(tmp_path / "whole", model, epochs=20))
    spec = spec_of(tmp_path / "killed", model, epochs=20)
    killed = []

    def kill_one():
        """Kills the worker that has the checkpoints' folder open in its command line's job."""
        import psutil

        checkpoints = tmp_path / "killed" / "checkpoints"
        while not list(checkpoints.glob("step-000000[12]?")):
            time.sleep(0.05)
        for process in psutil.process_iter(["cmdline"]):
            if "RayTrainWorker" in " ".join(process.info["cmdline"] or []):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return

    killer = threading.Thread(target=kill_one)
    killer.start()
    lines = []
    train(run_of(spec), Workers(num_workers=2, max_failures=2), lines.append)
    killer.join()
    assert killed
    assert any(line.startswith(("worker 0 failed: ", "worker 1 failed: ")) for line in lines)
    steps = logged(tmp_path / "killed", "step")
    again = len(steps) - len(set(steps))
    assert again <= spec.checkpoint_every  # at most one interval is done twice
    assert_same(whole, weights_of(tmp_path / "killed" / "model"), atol=2e-3)


@pytest.mark.heavy
def test_run_with_killed_driver_resumes(cluster, model, tmp_path):
    whole = trained(spec_of(tmp_path / "whole", model, epochs=8))
    spec = spec_of(tmp_path / "killed", model, epochs=8)
    (tmp_path / "spec.yaml").write_text(config.dump_yaml(spec), "utf-8")
    (tmp_path / "workers.yaml").write_text("num_workers: 2\n", "utf-8")
    command = ["jobs.train", f"{tmp_path}/spec.yaml", "--resources", f"{tmp_path}/workers.yaml"]
    driver = start_job(*command, address=cluster)
    deadline = time.monotonic() + 180
    while not list((tmp_path / "killed" / "checkpoints").glob("step-0000000[4-9]")):
        assert time.monotonic() < deadline and driver.poll() is None, driver.communicate()
        time.sleep(0.05)
    driver.kill()
    driver.communicate()
    again = start_job(*command, address=cluster)
    output, problem = again.communicate(timeout=240)
    assert again.returncode == 0, problem
    assert "step 24/24" in output and "step 2/24" not in output
    assert_same(whole, weights_of(tmp_path / "killed" / "model"), atol=2e-3)


@pytest.mark.heavy
def test_failed_run_reports_one_sentence(cluster, model, tmp_path):
    spec = spec_of(
        tmp_path, model, optimiser={"learning_rate": 1e30, "max_grad_norm": None, "warmup_ratio": 0}
    )
    with pytest.raises(JobError, match=r"step \d+: non-finite loss \(nan\)"):
        train(run_of(spec), Workers())
    assert (tmp_path / PROGRESS).read_text("utf-8").count(STARTED) == 1
