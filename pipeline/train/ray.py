"""Training on a Ray cluster with Ray Train, which restarts workers after failures."""

from __future__ import annotations

import contextlib
import posixpath
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from pipeline import config
from pipeline.config import JobError, SpecError
from pipeline.extras import MissingExtra
from pipeline.index.stage import profile_note
from pipeline.runtime import distributed, logs
from pipeline.train import loop
from pipeline.train.spec import TrainSpec

#: File with the progress lines of the first worker.
PROGRESS = "progress.log"
#: Interval at which a job reports that it waits for its workers, in seconds.
WAITING_SECONDS = 30.0


class Workers(config.Spec):
    """Workers of a training run. Their number never changes the result."""

    num_workers: PositiveInt = 1
    """Number of processes, each with a share of every batch."""
    num_cpus: PositiveFloat = 1.0
    """CPUs per worker, and the number of threads of each."""
    num_gpus: NonNegativeFloat = 0.0
    """GPUs per worker."""
    max_failures: int = Field(3, ge=0)
    """Maximum number of restarts from the last checkpoint after a worker has died."""

    @classmethod
    def unknown_field_note(cls, name: str) -> str:
        """Names the jobs whose profiles have the field."""
        return profile_note(name)

    def __str__(self) -> str:
        """Describes the workers.

        >>> print(Workers(num_workers=2, num_cpus=4, num_gpus=1))
        2 workers with 4 CPUs and 1 GPU each
        """
        cpus = _count(self.num_cpus, "CPU")
        resources = f"{cpus} and {_count(self.num_gpus, 'GPU')}" if self.num_gpus else cpus
        each = " each" if self.num_workers > 1 else ""
        return f"{_count(self.num_workers, 'worker')} with {resources}{each}"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def check_batches(runs: Iterable[TrainSpec], workers: Workers) -> None:
    """Raises `SpecError` if the workers cannot share the batches of a run equally."""
    for run in runs:
        is_multiple = run.batch_size % workers.num_workers == 0
        rule = f"a multiple of num_workers={workers.num_workers}"
        run.require(is_multiple, "batch_size", rule)


def default_workers(nodes: Sequence[Mapping[str, Any]] | None = None) -> Workers:
    """Returns one worker, which computes what a loop in this process would compute.

    It has a GPU if any node has one. Its CPUs, and thus its threads, are as many as PyTorch uses in
    this process, because sums of another number of threads are rounded differently. Of a cluster
    with smaller nodes, it takes all CPUs of the largest one.

    Args:
        nodes: Nodes as `ray.nodes()` returns them, which is the default.
    """
    import ray

    nodes = ray.nodes() if nodes is None else nodes
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    with_gpu = [node for node in resources if node.get("GPU", 0) >= 1]
    if not torch.backends.cuda.is_built():
        with_gpu = []
    largest = max((node.get("CPU", 0) for node in with_gpu or resources), default=0)
    num_cpus = max(1, min(torch.get_num_threads(), int(largest)))
    return Workers(num_cpus=num_cpus, num_gpus=1 if with_gpu else 0)


def train(
    runs: Mapping[str, TrainSpec], workers: Workers, say: Callable[[str], None] = print
) -> None:
    """Trains on a Ray cluster. All nodes must have access to the output folders at the same paths.

    The workers are started once for all runs.

    Raises:
        SpecError: A spec is invalid on the workers.
        JobError: A run failed, or workers died too often.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    check_batches(runs.values(), workers)
    output = posixpath.commonpath([run.output for run in runs.values()])
    progress = Path(output) / PROGRESS
    has_gpu = workers.num_gpus > 0
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={
            "runs": {title: config.dump(run) for title, run in runs.items()},
            "progress": str(progress),
        },
        scaling_config=ScalingConfig(
            num_workers=workers.num_workers,
            use_gpu=has_gpu,
            resources_per_worker={"CPU": workers.num_cpus, "GPU": workers.num_gpus},
        ),
        torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
        run_config=RunConfig(
            name="ray",
            storage_path=output,
            failure_config=FailureConfig(max_failures=workers.max_failures),
            callbacks=[_on_failures(progress)],
        ),
    )
    say(f"start {workers}")
    is_started = threading.Event()

    def say_first(line: str) -> None:
        is_started.set()
        say(line)

    failures: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:
            failures.append(error)

    # In the main thread, Ray Train would replace the handler of Ctrl-C by one that exits with 0.
    thread = threading.Thread(target=fit, daemon=True)
    with following(progress, say_first):
        thread.start()
        while thread.is_alive():
            thread.join(WAITING_SECONDS)
            if thread.is_alive() and not is_started.is_set():
                say(_waiting(workers))
    if failures:
        raise _cause(failures[0]) from None


def _waiting(workers: Workers) -> str:
    """Describes what delays the start of the workers: busy resources, or their imports."""
    import ray
    from ray.util import placement_group_table

    if all(group["state"] != "PENDING" for group in placement_group_table().values()):
        return f"waiting for {_count(workers.num_workers, 'worker')} to load modules"
    free = ray.available_resources()
    cpus, gpus = (_count(free.get(name, 0), name) for name in ("CPU", "GPU"))
    return f"waiting for {workers}; {cpus} and {gpus} of the cluster are free"


def _on_failures(progress: Path) -> Any:
    """Returns a callback that reports the failures of workers before they are restarted.

    At an error that would only repeat after a restart, it ends the training.
    """
    from ray.train import UserCallback

    class OnFailures(UserCallback):
        def after_exception(
            self, run_context: Any, worker_exceptions: Mapping[int, Exception]
        ) -> None:
            for error in worker_exceptions.values():
                if (cause := _known_cause(error)) is not None:
                    raise cause
            for rank, error in worker_exceptions.items():
                _append(progress, f"worker {rank} failed: {config.first_line(error)}")

    return OnFailures()


def _append(progress: Path, line: str) -> None:
    with progress.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@contextlib.contextmanager
def following(path: Path, say: Callable[[str], None], seconds: float = 0.5) -> Iterator[None]:
    """Reports each complete line that a process appends to a file, which need not exist yet."""
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
    import ray.train

    if torch.cuda.is_available():
        torch.cuda.set_device(ray.train.torch.get_device())
    runs = {title: config.parse(TrainSpec, fields) for title, fields in settings["runs"].items()}
    progress = Path(settings["progress"])

    def say(line: str) -> None:
        _append(progress, line)

    def report(step: int, metrics: dict[str, float]) -> None:
        ray.train.report({"step": step, **metrics})

    if distributed.rank() > 0:
        loop.train(runs, lambda line: None, report)
        return
    say(f"started {_count(distributed.num_workers(), 'worker')}")
    with logs.warnings_to(say):
        loop.train(runs, say, report)


def _known_cause(error: BaseException | None) -> Exception | None:
    """Returns the error of this package that caused an error of a worker, if there is one."""
    while error is not None:
        if isinstance(error, SpecError | JobError | MissingExtra):
            return error
        error = getattr(error, "cause", None) or error.__cause__
    return None


def _cause(error: Exception) -> Exception:
    failures = [getattr(error, "controller_failure", None)]
    failures += (getattr(error, "worker_failures", None) or {}).values()
    for failure in failures:
        if (cause := _known_cause(failure)) is not None:
            return cause
    return JobError(str(error).strip().splitlines()[-1] if str(error).strip() else repr(error))
