"""Merges small fragments of an index and removes what no reader needs any more.

    python -m jobs.maintain INDEX --dry-run
    python -m jobs.maintain INDEX
    python -m jobs.maintain INDEX --retain-hours 1 --fragment-items 10000

The job rewrites small neighbouring fragments and fragments with many deleted rows, removes versions
older than the retention period and files that no version needs, extends the index of the item ids,
and removes the listings of finished jobs. It holds the lease, so that no other job can write.
Searches go on; a reader of a version that is older than the retention period fails.

Rerun the same command to go on after an interruption.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs
from pipeline import config
from pipeline.index import check_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and maintains the index."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="URI of the index")
    parser.add_argument("--fragment-items", type=int, help="items per fragment (default: 65,536)")
    parser.add_argument(
        "--deleted",
        type=float,
        help="fraction of deleted rows from which a fragment is rewritten (default: 0.1)",
    )
    parser.add_argument(
        "--retain-hours", type=float, help="age up to which versions are kept (default: 24)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="report what would be done without writing"
    )
    args = vars(parser.parse(arguments))
    check_index(args["index"])
    is_dry = args.pop("dry_run")

    from pipeline.index import maintain

    fields = {name: value for name, value in args.items() if value is not None}
    spec = config.parse(maintain.MaintainSpec, fields)
    maintain.run(spec, job=jobs.job_id(), report=jobs.say, is_dry=is_dry)


if __name__ == "__main__":
    jobs.run(main)
