"""The loop under Ray Train, on real workers."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.train.ray import Workers, train
from tests.conftest import start_job
from tests.train.runs import assert_same, logged, spec_of, trained, weights_of


def test_rejects_batch_not_divisible_by_workers(model, tmp_path):
    with pytest.raises(SpecError, match="batch_size must be a multiple of num_workers=3, got 8"):
        train(spec_of(tmp_path, model), Workers(num_workers=3))


def test_two_ray_workers_equal_one_process(cluster, model, tmp_path):
    here = trained(spec_of(tmp_path / "here", model))
    spec = spec_of(tmp_path / "ray", model)
    lines = []
    train(spec, Workers(num_workers=2), lines.append)
    assert [line.split(":")[0] for line in lines] == [f"step {n}/6" for n in range(1, 7)]
    losses = [logged(tmp_path / name, "loss") for name in ("here", "ray")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    assert_same(here, weights_of(tmp_path / "ray" / "model"), atol=1e-4)


@pytest.mark.heavy
def test_worker_error_is_reported(cluster, model, tmp_path):
    train(spec_of(tmp_path, model, epochs=1), Workers())
    with pytest.raises(SpecError, match="seed must be .* as in the checkpoint .*, got 1"):
        train(spec_of(tmp_path, model, epochs=1, seed=1), Workers(max_failures=0))


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
    train(spec, Workers(num_workers=2, max_failures=2))
    killer.join()
    assert killed
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
        train(spec, Workers(max_failures=0))
