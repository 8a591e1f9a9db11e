"""Merges small fragments of an index and removes unused files, or deletes items.

    maxray maintain INDEX --dry-run
    maxray maintain INDEX
    maxray maintain INDEX --retain-hours 1 --fragment-items 10000
    maxray maintain INDEX --evaluations out/evaluation --retain-days 30
    maxray maintain delete INDEX --filter SQL       # deletes items; see maintain delete --help

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
from pathlib import Path

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import check_index
from pipeline.runtime.progress import open_display


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and maintains the index."""
    if jobs.run_form(FORMS, arguments):
        return
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


def _delete(arguments: Sequence[str]) -> None:
    """Deletes items from an index.

        maxray maintain delete INDEX --filter "source = 'old'" --dry-run
        maxray maintain delete INDEX --filter "source = 'old'"
        maxray maintain delete INDEX --ids ids.txt

    The file contains one item id per line. With --dry-run, the items are only counted. Rerun the
    same command to go on after an interruption.

    Open readers, such as a server until it reloads the index, still find the items. Their data
    remain on disk until `maxray maintain INDEX` compacts the index. If the source still lists an
    item, the next run of jobs.index adds it again.
    """
    parser = jobs.parser(_delete.__doc__, "delete")
    parser.add_argument("index", help="URI of the index")
    parser.add_argument("--ids", metavar="FILE", help="text file with one item id per line")
    parser.add_argument("--filter", help="SQL condition on the item columns")
    parser.add_argument("--dry-run", action="store_true", help="count the items without deleting")
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    check_index(args.index)
    ids = None if args.ids is None else _read_ids(args.ids)

    from pipeline.index import delete

    spec = config.parse(delete.DeleteSpec, {"index": args.index, "ids": ids, "filter": args.filter})
    with open_display(args.progress) as display:
        delete.run(spec, job=jobs.job_id(), report=display.say, is_dry=args.dry_run)


def _read_ids(path: str) -> list[str]:
    rule = "a UTF-8 text file with one item id per line"
    with config.reading("--ids", path, rule, UnicodeDecodeError):
        ids = [line for line in Path(config.absolute(path)).read_text("utf-8").splitlines() if line]
    if not ids:
        raise SpecError("--ids", path, rule, "is empty")
    return ids


FORMS: dict[str, jobs.Form] = {"delete": _delete}


if __name__ == "__main__":
    jobs.run(main)
