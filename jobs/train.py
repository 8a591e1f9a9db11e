"""Trains a model, a projection, an adapter or a reranker.

    python -m jobs.train jobs/specs/training/shapes_samer.yaml
    python -m jobs.train SPEC optimiser.learning_rate=1e-4 epochs=3
    python -m jobs.train SPEC --resources cluster/profiles/train_gpus.yaml
    python -m jobs.train SPEC --dry-run

The output folder of the spec receives:

    model/          the trained weights, in the form that the spec of an encoder refers to
    best/           the weights with the best result on the validation data
    metrics.jsonl   losses and metrics by step
    checkpoints/    state from which the same command resumes

A spec with a `sweep` trains one run per combination, each in a subfolder of `output`, and writes a
table and plots of all runs. With --report, it only writes those of the evaluations so far.

With --resources, training runs on a Ray cluster with the number of workers in the profile.
Otherwise, it runs in this process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and trains."""
    parser = jobs.spec_parser(__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="check the spec and list the runs without training"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="write the table and plots of a study so far without training",
    )
    args = parser.parse(arguments)

    from pipeline import config, extras
    from pipeline.atomic import check_writable
    from pipeline.train import study
    from pipeline.train.loop import Loop, check
    from pipeline.train.ray import Workers, train

    spec = config.load(study.StudySpec, args.spec, args.overrides)
    workers = None
    if args.resources:
        workers = config.load(Workers, args.resources, role="profile")
    if args.report and not spec.sweep:
        raise config.SpecError("sweep", spec.sweep, "given with --report")
    if spec.sweep:
        extras.require("matplotlib")  # fail now rather than at the final plot
    check_writable(spec.output, "output")
    runs = study.runs_of(spec)
    if args.report:
        print(study.report(spec, runs))
        return
    for run in runs:
        data = check(run.spec)
    if args.dry_run:
        for run in runs:
            print(f"{run.title}: {study.described(run.spec)}")
        return
    started = time.monotonic()
    for number, run in enumerate(runs, start=1):
        if len(runs) > 1:
            jobs.say(f"run {number} of {len(runs)}: {run.title}")
        if workers is None:
            Loop(run.spec, jobs.say, data=data if len(runs) == 1 else None).run()
        else:
            with jobs.cluster():
                train(run.spec, workers, jobs.say)
        jobs.say(f"{run.spec.output}/model")
    if spec.sweep:
        print(study.report(spec, runs))
    print(f"done in {(time.monotonic() - started) / 60:.1f} min")


if __name__ == "__main__":
    jobs.run(main)
