"""Draws which stored vectors of trained models are matched, and how similar they are.

    python -m examples.papers positions examples/papers/agc/specs/shapes.yaml --row agc_16
    python -m examples.papers positions SPEC --row "full > hpool num_vectors 16"

SPEC is a study that `python -m examples.papers study` has run. For each of its rows, or only those
of `--row`, the first run is evaluated on the validation data. The output folder of the spec
receives:

    positions.png   matching strength of each position of a document with the tokens of its
                    relevant queries, and the mean cosine between positions (AGC paper, figure 3)
    positions.csv   share of the strongest tenth of the positions, and the mean cosine
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs
from pipeline import config, extras
from pipeline.runtime.atomic import check_writable


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws."""
    parser = jobs.spec_parser(__doc__, profiles=False)
    parser.add_argument(
        "--row",
        dest="rows",
        action="append",
        default=[],
        metavar="ROW",
        help="row of the study, as in study.csv; may be repeated (default: all)",
    )
    args = parser.parse(arguments)

    from examples.papers.studies import positions, study

    spec = config.load(study.StudySpec, args.spec, args.overrides)
    extras.require("matplotlib")
    check_writable(spec.output, "output")
    print(positions.report(spec, study.runs_of(spec), args.rows))
    print(f"{spec.output}/positions.png")


if __name__ == "__main__":
    jobs.run(main)
