"""Removes items from an index.

    maxray delete INDEX --filter "source = 'old'" --dry-run
    maxray delete INDEX --filter "source = 'old'"
    maxray delete INDEX --ids ids.txt

The file contains one item id per line. With --dry-run, the items are only counted. Rerun the same
command to go on after an interruption.

Open readers, such as a server until it reloads the index, still find the items. Their data remain
on disk until jobs.maintain compacts the index. If the source still lists an item, the next run of
jobs.index adds it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import check_index
from pipeline.progress import open_display


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and removes the items."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="URI of the index")
    parser.add_argument("--ids", metavar="FILE", help="text file with one item id per line")
    parser.add_argument("--filter", help="SQL condition on the item columns")
    parser.add_argument("--dry-run", action="store_true", help="count the items without removing")
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    check_index(args.index)
    ids = None if args.ids is None else _read_ids(args.ids)

    from pipeline.index import delete

    spec = config.parse(delete.DeleteSpec, {"index": args.index, "ids": ids, "filter": args.filter})
    with open_display(args.progress) as display:
        delete.run(
            spec,
            job=jobs.job_id(),
            report=display.say,
            is_dry=args.dry_run,
        )


def _read_ids(path: str) -> list[str]:
    """Reads the ids of a file, one per line. Empty lines are ignored.

    Raises:
        SpecError: The file cannot be read or contains no ids.
    """
    rule = "a UTF-8 text file with one item id per line"
    config.check_exists(path, "--ids", rule)
    try:
        ids = [line for line in Path(config.absolute(path)).read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("--ids", path, rule, f"cannot be read ({error})") from None
    if not ids:
        raise SpecError("--ids", path, rule, "is empty")
    return ids


if __name__ == "__main__":
    jobs.run(main)
