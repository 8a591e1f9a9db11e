"""Runs the steps of a table. Finished steps are not repeated."""

from __future__ import annotations

import logging
import os
import posixpath
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from examples.papers.studies import study
from examples.papers.tables import latency, schedule
from examples.papers.tables.plan import Plan, PlannedStep
from examples.papers.tables.provenance import encoders
from examples.papers.tables.schedule import Scheduled
from examples.papers.tables.values import other_gain
from pipeline import config
from pipeline.config import SpecError
from pipeline.eval import evaluation
from pipeline.eval.report import files
from pipeline.eval.results import RESULTS
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import add, in_process, job, recompress
from pipeline.index.executor import Executor
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.runtime import logs
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.progress import start_board
from pipeline.train import loop
from pipeline.train import ray as ray_train
from pipeline.train.spec import TrainSpec

log = logging.getLogger("maxray.tables")

Spec = study.StudySpec | IndexSpec | recompress.RecompressSpec | EvaluateSpec | latency.LatencySpec
SPECS: dict[str, type[Spec]] = {
    "train": study.StudySpec,
    "index": IndexSpec,
    "recompress": recompress.RecompressSpec,
    "evaluate": EvaluateSpec,
    "latency": latency.LatencySpec,
}
#: File in the output folder of a training run with the hash of the spec of the finished run.
FINISHED = "finished.txt"


def parse(step: PlannedStep) -> Spec:
    """Returns the spec of a step."""
    with config.within(f"steps.{step.name}"):
        return config.parse(SPECS[step.job], step.fields)


class Settings(NamedTuple):
    """Settings with which the steps of a table run.

    Attributes:
        workers: Workers of training runs, or None to train in this process.
        parallel: Number of steps that run at the same time.
        full_reports: Whether evaluations write all of their files.
    """

    job_id: Callable[[], str]
    say: Callable[[str], None]
    workers: ray_train.Workers | None = None
    resources: IndexResources = IndexResources()
    parallel: int = 1
    full_reports: bool = True


def run(
    plan: Plan,
    records: str,
    settings: Settings,
    update: Callable[[Sequence[Scheduled]], None] = lambda steps: None,
) -> list[Scheduled]:
    """Runs the steps of a table on the Ray cluster to which this process is connected.

    Args:
        records: Folder of the files of finished steps, which tables share.
        update: Called with all steps when one is done.

    Returns:
        The steps with their states. Some may have failed.
    """
    steps = schedule.schedule(plan)
    for scheduled in steps:
        scheduled.spec = parse(scheduled.step)  # fails before any step runs
    executors = _executors(settings)
    progress = schedule.Progress(steps, settings.parallel, settings.say)

    def changed(scheduled: Scheduled) -> None:
        progress.changed(scheduled)
        if scheduled.state == "done":
            update(steps)

    def execute(scheduled: Scheduled, executor: Executor) -> dict[str, Any]:
        return _execute(scheduled.spec, settings, executor)

    scheduler = schedule.Scheduler(steps, records, execute, changed)
    settings.say(progress.summary())
    with _live(progress):
        scheduler.run(executors)
    return steps


def _executors(settings: Settings) -> list[Executor]:
    """Returns an executor for each of the parallel steps."""
    number, most = settings.parallel, 1
    if not isinstance(in_process.current(), in_process.InProcess):
        import ray

        from examples.papers.tables.encoder_pool import EncoderPool, max_pools

        resources = settings.resources
        most = max(most, max_pools(resources, ray.cluster_resources()))
        if number <= most or resources.autoscaling:
            start_board()  # several threads would start it several times
            return [EncoderPool(resources, number) for _ in range(number)]
    if number > most:
        rule = f"at most {most}, for which there are the resources of the profile"
        raise SpecError("--parallel", number, rule)
    return [in_process.InProcess()]


def _live(progress: schedule.Progress) -> AbstractContextManager[Any]:
    """Shows the table of the progress on a terminal, below the lines that are printed."""
    if not sys.stdout.isatty() or logs.is_json() or os.environ.get("TERM", "dumb") == "dumb":
        return nullcontext()
    from rich.live import Live

    return Live(get_renderable=progress.__rich__, refresh_per_second=1)


def _execute(spec: Any, settings: Settings, executor: Executor) -> dict[str, Any]:
    say, encode = settings.say, settings.resources.encode
    if isinstance(spec, study.StudySpec):
        if settings.workers is not None and not _is_free(settings.workers):
            executor.release()
        for training_run in study.runs_of(spec):
            _train(training_run.title, training_run.spec, settings.workers, say)
        return {"hardware": f"{settings.workers or evaluation.hardware()} (training)"}
    if isinstance(spec, recompress.RecompressSpec):
        columns = recompress.Recompression(spec, recompress.RecompressResources())
        add.run(columns, job=settings.job_id(), report=say, executor=executor)
        return {}
    if isinstance(spec, IndexSpec):
        job_id = settings.job_id()
        job.run(spec, settings.resources, job=job_id, report=say, executor=executor)
        record = {"encoders": encoders(spec.index)}
    elif isinstance(spec, latency.LatencySpec):
        record = {"versions": executor.submit(encode, latency.run, spec).result()}
    else:
        both = dict.fromkeys(map(other_gain, spec.measures))
        spec = spec.model_copy(update={"measures": list(dict.fromkeys([*spec.measures, *both]))})
        # In the process that has the encoder, and the GPU.
        evaluated = executor.submit(encode, evaluation.run, spec, log.info).result()
        if settings.full_reports:
            files.write(evaluated, spec.output)
        else:
            write_atomic(posixpath.join(spec.output, RESULTS), evaluated.to_json())
        record = {"versions": evaluated.versions}
    return {**record, "hardware": executor.submit(encode, evaluation.hardware).result()}


def _is_free(workers: ray_train.Workers) -> bool:
    """Returns True if the cluster has the resources of workers beside those that are used."""
    import ray

    free, number = ray.available_resources(), workers.num_workers
    needed = {"CPU": workers.num_cpus * number, "GPU": workers.num_gpus * number}
    return all(free.get(name, 0) >= amount for name, amount in needed.items())


def _train(
    title: str, spec: TrainSpec, workers: ray_train.Workers | None, say: Callable[[str], None]
) -> None:
    finished, key = Path(spec.output) / FINISHED, config.digest(spec)
    if finished.exists() and finished.read_text("utf-8") == key:
        say(f"{spec.output} is trained")
        return
    data = loop.check(spec)
    if workers is None:
        loop.train({title: spec}, say, data=data)
    else:
        ray_train.train({title: spec}, workers, say)
    write_atomic(str(finished), key)
