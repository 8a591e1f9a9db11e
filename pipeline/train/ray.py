"""The loop under Ray Train: any number of workers, started again where one of them dies."""

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

#: The file of a run that has what the first worker says.
PROGRESS = "progress.log"


class Workers(config.Spec):
    """Where a run is done; nothing of it changes what is learned.

    Attributes:
        num_workers: processes, each with its share of every batch.
        num_cpus, num_gpus: of each.
        max_failures: how often a run goes on from its last checkpoint after a worker has died.
    """

    num_workers: PositiveInt = 1
    num_cpus: PositiveFloat = 1.0
    num_gpus: NonNegativeFloat = 0.0
    max_failures: int = Field(3, ge=0)


def train(spec: TrainSpec, workers: Workers, say: Callable[[str], None] = print) -> None:
    """Trains on a Ray cluster; all its nodes must see the output folder under the same path.

    Args:
        say: what gets a line of progress at a time.

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
    """Says each line that others add to a file, from now on; looks for them every so often."""
    place = path.stat().st_size if path.exists() else 0
    is_over = threading.Event()

    def follow() -> None:
        nonlocal place
        is_last = False
        while not is_last:
            is_last = is_over.wait(seconds)
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(place)
                for line in file:
                    if line.endswith(b"\n"):
                        place += len(line)
                        say(line.decode().rstrip("\n"))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _train_worker(given: dict[str, Any]) -> None:
    """What each worker does."""
    import ray.train
    import torch

    spec = config.parse(TrainSpec, given["spec"])
    if torch.cuda.is_available():
        torch.cuda.set_device(ray.train.torch.get_device())
    progress = Path(spec.output) / PROGRESS

    def say(line: str) -> None:
        # A worker's own output is of its node; this file is where the driver looks.
        with progress.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    Loop(spec, say, lambda step, figures: ray.train.report({"step": step, **figures})).run()


def _cause(error: BaseException) -> Exception:
    """What a worker's failure came from, in one sentence."""
    failures = getattr(error, "worker_failures", None) or {}
    for failure in failures.values():
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, SpecError | JobError):
                return cause
            cause = getattr(cause, "cause", None) or cause.__cause__
    return JobError(str(error).strip().splitlines()[-1] if str(error).strip() else repr(error))
