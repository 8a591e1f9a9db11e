"""Training on a Ray cluster with Ray Train, which restarts workers after failures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.train.loop import Loop
from pipeline.train.spec import TrainSpec

#: File of a run with the progress lines of the first worker.
PROGRESS = "progress.log"


class Workers(config.Spec):
    """Workers of a training run. Their number never changes the result."""

    num_workers: PositiveInt = 1
    """Number of processes, each with a share of every batch."""
    num_cpus: PositiveFloat = 1.0
    """CPUs per worker."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs per worker."""
    max_failures: int = Field(3, ge=0)
    """Maximum number of restarts from the last checkpoint after a worker has died."""


def train(spec: TrainSpec, workers: Workers, say: Callable[[str], None] = print) -> None:
    """Trains on a Ray cluster. All nodes must have access to the output folder at the same path.

    Args:
        spec: The run.
        workers: Number and resources of the workers.
        say: Called with one progress line at a time.

    Raises:
        SpecError: The spec is invalid on the workers.
        JobError: the run failed, or workers died too often.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    if spec.batch_size % workers.num_workers:
        rule = f"a multiple of num_workers={workers.num_workers}"
        raise SpecError("batch_size", spec.batch_size, rule)
    has_gpu = workers.num_gpus > 0
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={"spec": config.dump(spec)},
        scaling_config=ScalingConfig(
            num_workers=workers.num_workers,
            use_gpu=has_gpu,
            resources_per_worker={"CPU": workers.num_cpus, "GPU": workers.num_gpus},
        ),
        torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
        run_config=RunConfig(
            name="ray",
            storage_path=spec.output,
            failure_config=FailureConfig(max_failures=workers.max_failures),
        ),
    )
    try:
        with following(Path(spec.output) / PROGRESS, say):
            trainer.fit()
    except Exception as error:
        raise _cause(error) from None


@contextlib.contextmanager
def following(path: Path, say: Callable[[str], None], seconds: float = 0.5) -> Iterator[None]:
    """Reports every line that another process appends to a file.

    Args:
        path: File. It need not exist yet.
        say: Called with each complete line.
        seconds: Interval between reads.
    """
    offset = path.stat().st_size if path.exists() else 0
    is_over = threading.Event()

    def follow() -> None:
        nonlocal offset
        is_last = False
        while not is_last:
            is_last = is_over.wait(seconds)
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if line.endswith(b"\n"):
                        offset += len(line)
                        say(line.decode().rstrip("\n"))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _train_worker(settings: dict[str, Any]) -> None:
    """Runs the training loop in a worker."""
    import ray.train
    import torch

    spec = config.parse(TrainSpec, settings["spec"])
    if torch.cuda.is_available():
        torch.cuda.set_device(ray.train.torch.get_device())
    progress = Path(spec.output) / PROGRESS

    def say(line: str) -> None:
        # A worker's own output is of its node. This file is where the driver looks.
        with progress.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    Loop(spec, say, lambda step, metrics: ray.train.report({"step": step, **metrics})).run()


def _cause(error: BaseException) -> Exception:
    """Describes the cause of a worker's failure in one sentence."""
    failures = getattr(error, "worker_failures", None) or {}
    for failure in failures.values():
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, SpecError | JobError):
                return cause
            cause = getattr(cause, "cause", None) or cause.__cause__
    return JobError(str(error).strip().splitlines()[-1] if str(error).strip() else repr(error))
