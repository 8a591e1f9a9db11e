"""Trains a sweep of runs and compares them.

    python -m examples.papers study examples/papers/agc/specs/shapes.yaml
    python -m examples.papers study SPEC --resources cluster/profiles/train_gpus.yaml
    python -m examples.papers study SPEC --report

SPEC is a training spec with a `sweep`: each combination is a run in a subfolder of `output`. The
options are those of `maxray train`. The output folder also receives `study.csv`, `study.png` and
other plots of all runs. With --report, the job only writes those of the evaluations so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs
from jobs import train
from pipeline import config, extras


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, trains and compares."""
    parser = train.parser(__doc__)
    parser.add_argument(
        "--report", action="store_true", help="write the table and plots so far without training"
    )
    args = parser.parse(arguments)

    from examples.papers.studies import study

    spec = config.load(study.StudySpec, args.spec, args.overrides)
    extras.require("matplotlib")  # fail now rather than at the final plot
    runs = study.runs_of(spec)
    if not args.report:
        train.train({run.title: run.spec for run in runs}, args)
    if not args.dry_run:
        print(study.report(spec, runs))


if __name__ == "__main__":
    jobs.run(main)
