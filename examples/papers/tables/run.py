"""Runs the steps of a table. Finished steps are not repeated."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from examples.papers.studies import study
from examples.papers.tables.plan import PlannedStep
from pipeline import config
from pipeline.eval import evaluation
from pipeline.eval.report import files
from pipeline.eval.results import RESULTS
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import add, job, recompress
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.runtime.atomic import write_atomic
from pipeline.train import loop, ray
from pipeline.train.spec import TrainSpec

Spec = study.StudySpec | IndexSpec | recompress.RecompressSpec | EvaluateSpec
SPECS: dict[str, type[Spec]] = {
    "train": study.StudySpec,
    "index": IndexSpec,
    "recompress": recompress.RecompressSpec,
    "evaluate": EvaluateSpec,
}
#: File in the output folder of a training run with the hash of the spec of the finished run.
FINISHED = "finished.txt"


def parse(step: PlannedStep) -> Spec:
    """Returns the spec of a step."""
    with config.within(f"steps.{step.name}"):
        return config.parse(SPECS[step.job], step.fields)


def run(
    steps: Sequence[PlannedStep],
    *,
    job_id: Callable[[], str],
    say: Callable[[str], None],
    workers: ray.Workers | None = None,
    resources: IndexResources | None = None,
    full_reports: bool = True,
) -> None:
    """Runs steps in order on the Ray cluster to which this process is connected."""
    specs = [parse(step) for step in steps]  # fails before any step runs
    for number, (step, spec) in enumerate(zip(steps, specs, strict=True), start=1):
        started = time.monotonic()
        title = f"step {number} of {len(steps)}: {step.name}"
        if isinstance(spec, study.StudySpec):
            say(f"{title} {spec.output}")
            for training_run in study.runs_of(spec):
                _train(training_run.title, training_run.spec, workers, say)
        elif isinstance(spec, IndexSpec):
            say(f"{title} {spec.index}")
            job.run(spec, resources or IndexResources(), job=job_id(), report=say)
        elif isinstance(spec, recompress.RecompressSpec):
            say(f"{title} {spec.index}")
            add.run(
                recompress.Recompression(spec, recompress.RecompressResources()),
                job=job_id(),
                report=say,
            )
        else:
            say(f"{title} {spec.output}")
            evaluated = evaluation.run(spec, say)
            if full_reports:
                files.write(evaluated, spec.output)
            else:
                write_atomic(posixpath.join(spec.output, RESULTS), evaluated.to_json())
        say(f"{step.name}: {time.monotonic() - started:.1f} s")


def _train(
    title: str, spec: TrainSpec, workers: ray.Workers | None, say: Callable[[str], None]
) -> None:
    finished, key = Path(spec.output) / FINISHED, config.digest(spec)
    if finished.exists() and finished.read_text("utf-8") == key:
        say(f"{spec.output} is trained")
        return
    data = loop.check(spec)
    if workers is None:
        loop.train({title: spec}, say, data=data)
    else:
        ray.train({title: spec}, workers, say)
    write_atomic(str(finished), key)
