"""Trains what a spec says, from the last checkpoint in its output folder on.

    python -m jobs.train jobs/specs/training/shapes_samer.yaml
    python -m jobs.train SPEC optimiser.learning_rate=1e-4 epochs=3
    python -m jobs.train SPEC --resources cluster/profiles/train_gpus.yaml
    python -m jobs.train SPEC --dry-run

Writes to the spec's `output`: `model/`, what was trained, as an encoder's spec names it; `best/`,
the best one on the validation data; `metrics.jsonl`; `checkpoints/`, from which the same command
goes on. A spec with a `sweep` is a run for each of its combinations, in folders below `output`, and
a table and a plot of all of them. With --resources it runs on a Ray cluster, on as many workers as
the profile says; without, in this process. --dry-run checks the spec and says what would be done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and trains."""
    parser = jobs.spec_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="check the spec, train nothing")
    args = parser.parse(arguments)

    from pipeline import config, extras
    from pipeline.atomic import check_writable
    from pipeline.train import study
    from pipeline.train.loop import Loop, check
    from pipeline.train.ray import Workers, train

    spec = config.load(study.StudySpec, args.spec, args.overrides)
    workers = None
    if args.resources:
        workers = config.load(Workers, args.resources, what="profile")
    if spec.sweep:
        extras.require("matplotlib")  # for the plot of all runs, at their end
    check_writable(spec.output, "output")
    runs = study.runs_of(spec)
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
