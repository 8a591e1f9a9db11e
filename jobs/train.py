"""Trains a model, a projection, an adapter or a reranker.

    maxray train jobs/specs/training/shapes_samer.yaml
    maxray train SPEC optimiser.learning_rate=1e-4 epochs=3
    maxray train SPEC --resources cluster/profiles/train_gpus.yaml
    maxray train SPEC --in-process
    maxray train SPEC --dry-run

The output folder of the spec receives:

    model/          the trained weights, in the form that the spec of an encoder refers to
    best/           the weights with the best result on the validation data
    metrics.jsonl   losses and metrics by step
    checkpoints/    state from which the same command resumes

A spec with a `sweep` trains one run per combination, each in a subfolder of `output`, and writes a
table and plots of all runs. With --report, it only writes those of the evaluations so far.

Training runs on Ray Train, on the cluster at RAY_ADDRESS or on a local cluster. By default, it has
one worker, with a GPU if the cluster has one; --resources names a profile with more. Starting Ray
and the worker takes several seconds, once per command. With --in-process, the same loop runs in
this process without Ray, with the same results. Either resumes a run that the other started.
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
    parser.add_argument(
        "--in-process", action="store_true", help="train in this process, without Ray"
    )
    args = parser.parse(arguments)
    if args.in_process and args.resources:
        parser.error("--in-process cannot be combined with --resources")

    from pipeline import config, extras
    from pipeline.atomic import check_writable
    from pipeline.train import ray, study
    from pipeline.train.checkpoints import Checkpoints
    from pipeline.train.loop import check

    spec = config.load(study.StudySpec, args.spec, args.overrides)
    workers = None
    if args.resources:
        workers = config.load(ray.Workers, args.resources, role="profile")
    if args.report and not spec.sweep:
        raise config.SpecError("sweep", spec.sweep, "given with --report")
    if spec.sweep:
        extras.require("matplotlib")  # fail now rather than at the final plot
    check_writable(spec.output, "output")
    runs = study.runs_of(spec)
    if args.report:
        print(study.report(spec, runs))
        return
    if workers:
        ray.check_batches(runs, workers)
    for run in runs:
        data = check(run.spec)
        Checkpoints(run.spec).check_spec()  # before Ray starts
    if args.dry_run:
        for run in runs:
            print(f"{run.title}: {study.described(run.spec)}")
        return
    started = time.monotonic()
    if args.in_process:
        study.train(runs, jobs.say, data=data if len(runs) == 1 else None)
    else:
        del data  # the worker loads its own
        jobs.say("start Ray")
        with jobs.cluster():
            ray.train(runs, workers or ray.default_workers(), jobs.say)
    if spec.sweep:
        print(study.report(spec, runs))
    print(f"done in {(time.monotonic() - started) / 60:.1f} min")


if __name__ == "__main__":
    jobs.run(main)
