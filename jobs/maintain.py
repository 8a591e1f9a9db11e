"""Merges small fragments of an index and removes what no reader needs any more.

    maxray maintain INDEX --dry-run
    maxray maintain INDEX
    maxray maintain INDEX --retain-hours 1 --fragment-items 10000
    maxray maintain INDEX --evaluations out/evaluation --retain-days 30

The job rewrites small neighbouring fragments and fragments with many deleted rows, removes versions
older than the retention period and files that no version needs, extends the index of the item ids,
and removes the listings of finished jobs. It holds the lease, so that no other job can write.
Searches go on; a reader of a version that is older than the retention period fails.

With --evaluations, it also removes cached results from output folders of jobs.evaluate, if no
evaluation has used them for --retain-days. A later evaluation computes them again.

Rerun the same command to go on after an interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import check_index
from pipeline.progress import open_display


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
        "--evaluations",
        action="append",
        default=[],
        metavar="FOLDER",
        help="output folder of jobs.evaluate whose unused results are removed (can be repeated)",
    )
    parser.add_argument(
        "--retain-days",
        type=float,
        default=30.0,
        help="time after which unused results of evaluations are removed (default: 30)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="report what would be done without writing"
    )
    jobs.add_progress(parser)
    args = vars(parser.parse(arguments))
    check_index(args["index"])
    is_dry, progress = args.pop("dry_run"), args.pop("progress")
    outputs, days = args.pop("evaluations"), args.pop("retain_days")
    if not days >= 0:
        raise SpecError("--retain-days", days, "at least 0")
    jobs.check_outputs(outputs, "--evaluations")

    from pipeline.eval.cache import Cache
    from pipeline.index import maintain

    fields = {name: value for name, value in args.items() if value is not None}
    spec = config.parse(maintain.MaintainSpec, fields)
    with open_display(progress) as display:
        maintain.run(spec, job=jobs.job_id(), report=display.say, is_dry=is_dry)
        for output in outputs:
            number, size = Cache(output).remove_unused(timedelta(days=days), is_dry=is_dry)
            verb = "would be removed" if is_dry else "removed"
            display.say(f"{output}: {number:,} cached results {verb}, {size / 1e6:,.1f} MB")


if __name__ == "__main__":
    jobs.run(main)
