"""Makes the small models in jobs/data/models anew: `make models`, more than two hours.

    python -m jobs.data.make_models

A ColPali, a SigLIP and on it an EDJE, begun at random with seed 0 (`pipeline.train.tiny`) and
trained on shapes by the specs of their names in jobs/specs/training. A stopped run goes on from its
last checkpoint in out/models. Other processors round otherwise: figures may differ in their last
digits.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import jobs
from jobs import train

ROOT = Path(__file__).parents[2]
#: Of what is written by a run, what comes with the package.
NAMES = ("shapes_colpali", "shapes_siglip", "shapes_edje")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, trains and copies."""
    jobs.parser(__doc__).parse(arguments)

    from pipeline.train import tiny

    for name, make in zip(NAMES, (tiny.colpali, tiny.siglip, tiny.bert), strict=True):
        make(ROOT / "out" / "models" / "untrained" / name)
        train.main([str(ROOT / "jobs" / "specs" / "training" / f"{name}.yaml")])
        made = ROOT / "out" / "models" / name / "model"
        shipped = ROOT / "jobs" / "data" / "models" / name
        shutil.rmtree(shipped, ignore_errors=True)
        shutil.copytree(made, shipped)
        for about in (shipped / "training.json", shipped / "edje.json"):
            if about.exists():
                about.write_text(about.read_text("utf-8").replace(f"{ROOT}/", ""), "utf-8")
        print(shipped)


if __name__ == "__main__":
    jobs.run(main)
