"""Tests that jobs survive random faults: kills, lost nodes, partitions, full disks and others.

    python -m tests.chaos out/chaos
    python -m tests.chaos out/chaos --faults 20 --seed 1 --phases encoding committing --nodes 1
    python -m tests.chaos out/chaos --out chaos.json --figure chaos.png
    python -m tests.chaos out/chaos --targets network --faults 30

The suite starts a Ray cluster on this machine and runs jobs.index, recompress, backfill, candidates
and maintain on a small corpus in FOLDER. It disturbs them at random moments, resumes them with the
same command and checks that the index equals that of an undisturbed run bit for bit, that no item
is lost or duplicated, that no lease is orphaned, and that no process or shared memory leaks.

Rerun the same command to resume an interrupted suite. Exit code 1 means that a check failed.
Requires Linux. The disk that is filled is a tmpfs; if mounting is not permitted, RLIMIT_FSIZE is
set instead. The clock jumps if there is a C compiler. The target `network` takes the links of nodes
down. It requires root and `ip` (iproute2), because each node gets a network namespace.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jobs
from pipeline.config import JobError, SpecError, absolute
from tests.chaos.faults import ACTIONS, DEFAULT_TARGETS, PHASES


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the suite."""
    parser = jobs.parser(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="folder of the suite")
    parser.add_argument(
        "--faults", type=jobs.positive, default=200, help="number of faults (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument(
        "--phases", nargs="+", choices=PHASES, default=PHASES, help="phases (default: all)"
    )
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=ACTIONS,
        default=DEFAULT_TARGETS,
        help="processes and resources to disturb (default: all but network)",
    )
    parser.add_argument(
        "--nodes", type=int, default=2, help="worker nodes besides the head (default: 2)"
    )
    parser.add_argument("--out", metavar="FILE", help="JSON file with all faults and counts")
    parser.add_argument("--figure", metavar="FILE", help="PNG file with the recovery times")
    args = parser.parse_args(arguments)  # intermixed parsing does not support several values
    if args.nodes < 0:
        raise SpecError("--nodes", args.nodes, "at least 0")
    if sys.platform != "linux":
        raise JobError("the chaos suite requires Linux")

    from pipeline.runtime.atomic import check_writable, write_atomic

    check_writable(args.folder, "FOLDER")
    for option in ("out", "figure"):
        if (path := getattr(args, option)) is not None:
            check_writable(path, f"--{option}", as_file=True)

    from tests.chaos import report, run

    phases = [phase for phase in PHASES if phase in args.phases]
    folder = Path(absolute(args.folder))
    targets = [target for target in ACTIONS if target in args.targets]
    rounds = run.run(folder, args.faults, args.seed, phases, targets, args.nodes, jobs.say)
    print(report.text(rounds))
    if args.out:
        write_atomic(args.out, report.to_json(rounds))
    if args.figure:
        write_atomic(args.figure, report.figure(rounds))
    if problems := report.problems(rounds):
        raise JobError(f"{len(problems)} checks failed: {'; '.join(problems[:5])}")


if __name__ == "__main__":
    jobs.run(main)
