"""Builds an open collection with queries from pinned packages of Debian.

    python -m examples.collection build DATA [--slice 1k 10k pages-1k images clips ...]
    python -m examples.collection licences DATA
    python -m examples.collection table OUTPUT
    python -m examples.collection study SPEC
    python -m examples.collection defaults SPEC [--table defaults.csv]
    python -m examples.collection regret SPEC
    python -m examples.collection projection OUTPUT

`table` prints tables of the output folder of an evaluation. `study` compares the training-free
methods at all budgets, codecs and scores, and `defaults` chooses among them on one half of the
queries and tests the choice on the other. `regret` prints how far recommendations by the judged
queries of one half miss the required quality on the other. `projection` fits a projection of the
token vectors to 128 dimensions.

Rerun the same command to resume. Packages that cannot be downloaded or read are listed, the slices
are made of the others, and the exit code is 2. Once the packages are in DATA, no network is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jobs
from examples.collection.build import SLICES, build
from examples.collection.defaults import regret, report
from examples.collection.licences import licences
from examples.collection.projection import fit_projection
from examples.collection.study import StudySpec, study
from examples.collection.table import tables
from pipeline.config import parse, read
from pipeline.runtime.atomic import check_writable


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and builds slices, or prints tables."""
    parser = jobs.parser(__doc__)
    verbs = ["build", "licences", "table", "study", "defaults", "regret", "projection"]
    parser.add_argument("verb", choices=verbs, help="what to do")
    parser.add_argument(
        "data",
        metavar="DATA",
        help="folder of packages and slices, output of an evaluation, or spec of a study",
    )
    parser.add_argument(
        "--slice", nargs="+", choices=SLICES, default=["1k"], help="sizes (default: 1k)"
    )
    parser.add_argument("--table", help="CSV file of all rows, which `defaults` writes")
    args = parser.parse(arguments)
    if args.verb == "table":
        print("\n".join(tables(Path(args.data))))
        return
    if args.verb in ("study", "defaults", "regret"):
        spec = parse(StudySpec, read(args.data, "DATA"))
        if args.verb == "study":
            study(spec, say=jobs.say)
        elif args.verb == "regret":
            print("\n".join(regret(spec)))
        else:
            print("\n".join(report(spec, Path(args.table) if args.table else None)))
        return
    check_writable(args.data, "DATA")
    if args.verb == "projection":
        print(fit_projection(Path(args.data)))
        return
    if args.verb == "licences":
        for line in licences(Path(args.data), say=jobs.say):
            print(line)
    elif missing := build(Path(args.data), args.slice, say=jobs.say):
        raise SystemExit(jobs.report_missing(missing))


if __name__ == "__main__":
    jobs.run(main)
