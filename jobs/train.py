"""Trains what a spec says, from the last checkpoint in its output folder on.

    python -m jobs.train jobs/specs/training/shapes_colpali.yaml
    python -m jobs.train SPEC optimiser.learning_rate=1e-4 epochs=3
    python -m jobs.train SPEC --dry-run

Writes to the spec's `output`: `model/`, the trained artefact; `best/`, the one that was best on
held-out data; `metrics.jsonl`; and `checkpoints/`, from which the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and trains."""
    parser = jobs.spec_parser(__doc__, profiles=False)
    args = parser.parse(arguments)

    from pipeline import config
    from pipeline.atomic import check_writable
    from pipeline.registry import LEARNERS
    from pipeline.train.loop import Loop, TrainSpec

    spec = config.load(TrainSpec, args.spec, args.overrides)
    check_writable(spec.output, "output")
    with config.within("learner"):
        LEARNERS.load(spec.learner.name).check(spec.learner)
    started = time.monotonic()
    loop = Loop(spec, jobs.say)
    loop.run()
    print(f"{spec.output}/model after {(time.monotonic() - started) / 60:.1f} min")


if __name__ == "__main__":
    jobs.run(main)
