"""Trains the small models in jobs/data/models: `make models`, two to three hours.

    python -m examples.papers.data.make_models
    python -m examples.papers.data.make_models --untrained       # only the initial weights

A ColPali and a SigLIP are initialised with seed 0 (`tests.tiny.untrained`) and trained on shapes
by the specs of their names in examples/papers/specs/training. Then the ColPali's projection is
trained through SaMer by shapes_samer.yaml, and an EDJE on it by shapes_edje_align.yaml and
shapes_edje.yaml.
A stopped run resumes from its last checkpoint in out. Rounding differs between processors: metrics
may differ in their last digits.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import jobs
from jobs import train

ROOT = Path(__file__).parents[3]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, trains and copies."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--untrained", action="store_true", help="write only the initial weights")
    args = parser.parse(arguments)

    from tests.tiny import untrained as tiny

    untrained = ROOT / "out" / "models" / "untrained"
    tiny.colpali(untrained / "shapes_colpali")
    tiny.siglip(untrained / "shapes_siglip")
    tiny.bert(untrained / "shapes_edje")
    if args.untrained:
        print(untrained)
        return
    # Specs in order of their dependencies, and their output folders.
    specs = {
        "shapes_colpali": "models",
        "shapes_siglip": "models",
        "shapes_samer": "training",
        "shapes_edje_align": "models",
        "shapes_edje": "models",
    }
    for name, folder in specs.items():
        train.main([str(ROOT / "examples/papers/specs/training" / f"{name}.yaml"), "--in-process"])
        if name == "shapes_edje_align":  # initial weights of the next
            continue
        run = ROOT / "out" / folder / name / "model"
        shipped = ROOT / "jobs" / "data" / "models" / name
        shutil.rmtree(shipped, ignore_errors=True)
        shutil.copytree(run, shipped)
        for metadata in (shipped / "training.json", shipped / "edje.json"):
            if metadata.exists():
                metadata.write_text(metadata.read_text("utf-8").replace(f"{ROOT}/", ""), "utf-8")
        print(shipped)


if __name__ == "__main__":
    jobs.run(main)
