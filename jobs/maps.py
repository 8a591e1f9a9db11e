"""Draws similarity maps of phrases, for comparison with their true locations.

    maxray maps PHRASES OUT.png --index out/shapes/index full samer_16
    maxray maps PHRASES OUT.png --index INDEX NAME --index OTHER NAME --items a.png b.png

PHRASES is a JSON Lines file with the fields item_id, phrase and boxes, in the format of `grounding`
in jobs.evaluate. The output has a row per phrase and a column per representation. The boxes of the
phrase are outlined.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

import jobs
from pipeline.config import SpecError, check_exists
from pipeline.index import check_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the maps."""
    parser = jobs.parser(__doc__)
    parser.add_argument("phrases", metavar="PHRASES", help="phrases with boxes (.jsonl)")
    parser.add_argument("out", metavar="OUT", help="output file (.png)")
    parser.add_argument(
        "--index",
        dest="indexes",
        nargs="+",
        action="append",
        required=True,
        metavar=("INDEX", "NAME"),
        help="index and its representations to draw (default: all); may be repeated",
    )
    parser.add_argument(
        "--count", type=jobs.positive, default=3, help="number of phrases (default: 3)"
    )
    parser.add_argument("--items", nargs="+", metavar="ID", help="draw phrases of these items only")
    args = parser.parse_args(arguments)  # `parse` does not support options with several values
    check_exists(args.phrases, "grounding")
    for uri, *_ in args.indexes:
        check_index(uri)

    from pipeline.atomic import check_writable, write_atomic
    from pipeline.eval.grounding import check_phrases, read_phrases
    from pipeline.search.map_sheets import phrase_sheet
    from pipeline.search.searcher import open_index

    check_writable(args.out, "OUT", as_file=True)
    phrases = [p for p in read_phrases(args.phrases) if not args.items or p.item_id in args.items]
    phrases = phrases[: args.count]
    if not phrases:
        raise SpecError("items", args.items, f"the ids of items with phrases in {args.phrases}")
    columns = []
    for uri, *names in args.indexes:
        searcher = open_index(uri)
        names = names or list(searcher.index.representations())
        check_phrases(phrases, searcher.index, names)
        folder = f"{posixpath.basename(uri.rstrip('/'))}/" if len(args.indexes) > 1 else ""
        columns += [(f"{folder}{name}", searcher, name) for name in names]
    write_atomic(args.out, phrase_sheet(columns, phrases))
    print(args.out)


if __name__ == "__main__":
    jobs.run(main)
