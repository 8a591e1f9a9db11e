"""Searches an index, for one query or for a file of them.

    python -m jobs.search out/cranfield/index "how does a slipstream change the lift of a wing"
    python -m jobs.search INDEX "a query" --representation hpool_32 --k 5 --score hybrid
    python -m jobs.search INDEX "a query" --group-by parent --where "modality = 'text'"
    python -m jobs.search INDEX --queries queries.jsonl --k 100 --run out/full.trec
    python -m jobs.search INDEX --query-vectors query.npy
    python -m jobs.search out/pages/index "who pays for the repairs" --k 3 --save-maps out/maps

Prints hits, the words that matched best marked; with --run it writes a run in TREC's form instead.
With --save-maps it also writes each hit with the matching words lit, by the whole query and by each
of its tokens: the page, the photo, the frame or the wave of what is said, as PNG; and the numbers
as JSON.
Queries come as JSON lines (`_id`, `text`) or `id<TAB>text`, vectors as one .npy of shape (query
tokens, dim) or as Parquet with the columns `id` and `vectors`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jobs
from pipeline.config import SpecError
from pipeline.schema import Hit, Place

if TYPE_CHECKING:  # loaded when an index is opened: --help is quick
    import numpy as np

    from pipeline.search.searcher import Searcher

BOLD_UNDERLINED, BRACKETS = ("\x1b[1;4m", "\x1b[0m"), ("[", "]")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and searches."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="the URI of an index")
    parser.add_argument("query", nargs="*", default=[], help="a text")
    parser.add_argument("--queries", metavar="FILE", help="texts: .jsonl, or id<TAB>text")
    parser.add_argument("--query-vectors", metavar="FILE", help="vectors: .npy or .parquet")
    parser.add_argument("--representation", help="default: full if there is one, else the first")
    parser.add_argument("--k", type=jobs.positive, default=10, help="hits for each query")
    parser.add_argument("--score", default="late", help="late, single or hybrid")
    parser.add_argument("--group-by", choices=["parent"], help="the best item of each parent only")
    parser.add_argument("--where", metavar="SQL", help="a Lance filter over the items' columns")
    parser.add_argument("--version", type=int, help="an older version of the index")
    parser.add_argument("--run", metavar="OUT", help="write a TREC run, print no hits")
    parser.add_argument("--save-maps", metavar="FOLDER", help="write similarity maps of the hits")
    parser.add_argument(
        "--documents",
        metavar="[COLLECTION=]FOLDER",
        action="append",
        default=[],
        help="where the files of the hits lie now; may stand several times",
    )
    args = parser.parse(arguments)
    if args.save_maps and (args.run or args.queries):
        parser.error("--save-maps is for one query, without --run")
    if sum(map(bool, (args.query, args.queries, args.query_vectors))) != 1:
        parser.error("one of QUERY, --queries and --query-vectors is needed, and only one")

    from pipeline.atomic import check_writable
    from pipeline.eval.metrics import write_run
    from pipeline.eval.topics import read_queries, read_query_vectors
    from pipeline.search.searcher import open_index

    if args.queries:
        queries = read_queries(args.queries)
    elif args.query_vectors:
        queries = read_query_vectors(args.query_vectors)
    else:
        queries = {"1": " ".join(args.query)}
    if args.run is not None:
        check_writable(args.run, "run", as_file=True)
    if args.save_maps:
        check_writable(args.save_maps, "save-maps")
    searcher = open_index(args.index, args.version)
    name, _ = searcher.representation(args.representation)
    how = {
        "representation": name,
        "k": args.k,
        "score": args.score,
        "group_by": args.group_by,
        "where": args.where,
    }
    if args.run:
        rankings = searcher.rank(list(queries.values()), **how)
        run = {
            query_id: ranking.scores_by_parent() if args.group_by else ranking.scores_by_item()
            for query_id, ranking in zip(queries, rankings, strict=True)
        }
        write_run(args.run, run, tag=f"{name}.{args.score}")
        print(f"{len(run)} queries, {sum(map(len, run.values()))} hits: {args.run}")
        return
    marks = BOLD_UNDERLINED if sys.stdout.isatty() else BRACKETS
    for (query_id, query), hits in zip(
        queries.items(), searcher.search(list(queries.values()), **how), strict=True
    ):
        if len(queries) > 1:
            print(f"\n{query_id}: {query if isinstance(query, str) else 'vectors'}")
        print(page(hits, marks))
        if args.save_maps:
            write_maps(searcher, query, hits, name, args.save_maps, args.documents)


def write_maps(
    searcher: Searcher,
    query: str | np.ndarray,
    hits: Sequence[Hit],
    representation: str,
    folder: str,
    documents: Sequence[str],
) -> None:
    """Writes the similarity maps of hits and says where, or why a hit has none.

    Raises:
        SpecError: no hit has one; as the first says.
    """
    from pipeline.search import maps
    from pipeline.search.explain import printable

    moved = (named.rpartition("=") for named in documents)
    previews = maps.Previews(searcher.index, {name: where for name, _, where in moved})
    errors = []
    for hit in hits:
        try:
            map = maps.similarity_map(searcher, query, hit.item_id, representation)
            maps.write_maps(folder, hit.rank, previews, map)
        except SpecError as error:
            errors.append(error)
            if len(errors) < len(hits):
                print(f"map {hit.rank}: none; {error}")
            continue
        best = map.best_word()
        print(f"map {hit.rank}: {folder}/{hit.rank}.png; brightest: {printable(best.text)}")
    if errors and len(errors) == len(hits):
        raise errors[0]


def page(hits: Sequence[Hit], marks: tuple[str, str]) -> str:
    """The hits of a query for reading: rank, score, id, place, title, and a snippet below."""
    from pipeline.search.explain import best_half, best_place, printable, snippet

    if not hits:
        return "no hits"
    lines = []
    for hit in hits:
        head = [f"{hit.rank:3}  {hit.score:8.4f}", hit.item_id, span(hit.span), hit.title or ""]
        lines.append("  ".join(printable(part) for part in head if part))
        ranges = [words for match in best_half(hit.matches) for words in match.spans]
        if hit.text and (shown := snippet(hit.text, ranges, marks=marks)):
            lines.append(f"     {shown}")
        if hit.text and (where := best_place(hit.text, hit.matches)):
            lines.append(f"     {place(where)}")
    return "\n".join(lines)


def span(span: dict[str, Any] | None) -> str:
    """Where in its parent a hit lies.

    >>> span({"unit": "page", "start": 3.0, "end": 3.0}), span(None)
    ('(page 3)', '')
    """
    if not span or not span["unit"]:
        return ""
    start, end = (f"{span[side]:g}" for side in ("start", "end"))
    return f"({span['unit']} {start})" if start == end else f"({span['unit']} {start}-{end})"


def place(place: Place) -> str:
    """Where in a hit the match is.

    >>> place(Place((0, 4), (0.1, 0.25, 0.5, 0.3), (4.0, 6.0)))
    'seen 4.0-6.0 s, box 0.10 0.25 0.50 0.30'
    >>> place(Place((0, 4), None, (5.31, 7.0)))
    'heard 5.3-7.0 s'
    """
    parts = []
    if place.times:
        start, end = place.times
        parts.append(f"{'seen' if place.box else 'heard'} {start:.1f}-{end:.1f} s")
    if place.box:
        parts.append("box " + " ".join(f"{side:.2f}" for side in place.box))
    return ", ".join(parts)


if __name__ == "__main__":
    jobs.run(main)
