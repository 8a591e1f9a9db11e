"""Searches an index, for one query or for a file of them.

    python -m jobs.search out/cranfield/index "how does a slipstream change the lift of a wing"
    python -m jobs.search INDEX "a query" --representation hpool_32 --k 5 --score hybrid
    python -m jobs.search INDEX "a query" --score hybrid --weights 1 0.5
    python -m jobs.search INDEX "a query" --group-by parent --filter "modality = 'text'"
    python -m jobs.search INDEX "a query" --ids ids.txt --json
    python -m jobs.search INDEX --queries queries.jsonl --k 100 --run out/full.trec
    python -m jobs.search INDEX --queries queries.jsonl --run out/full.trec --actors 4
    python -m jobs.search INDEX "a query" --rerank edje=out/edje/model --rerank-depth 20
    python -m jobs.search INDEX --image photo.jpg
    python -m jobs.search INDEX "but in red" --image photo.jpg
    python -m jobs.search INDEX --query-vectors query.npy
    python -m jobs.search out/pages/index "who pays for the repairs" --k 3 --save-maps out/maps
    python -m jobs.search INDEX "a red car" --rerank edje=FOLDER --k 5 --save-sheet out/red.png

Prints hits with their best passages: the words that contribute most to the score are marked, and
below stand the box or the seconds of each passage. With --json each hit is a line of JSON with all
matches and passages (docs/concepts/explanations.md).
With --run it writes a run in TREC's form instead, and says how many queries were encoded and scored
a second. With --actors the index is searched in so many parts, each in a Ray actor.
With --rerank the best hits (10, or --rerank-depth) are put into the order of EDJE's joint encoder,
which reads the query with what its adapter made of each, see jobs.backfill; for a picture with the
texts of the hits. A hit that it cannot read keeps its place and says so.
With --save-maps it also writes each hit with the matching words highlighted, by the whole query and
by each of its tokens: the page, the photo, the frame or the waveform of the speech, as PNG with a
legend; and the numbers as JSON. With --save-sheet it writes one PNG of the hits side by side; with
--rerank below those of the first stage.
Queries come as JSON lines (`_id`, `text`) or `id<TAB>text`, vectors as one .npy of shape (query
tokens, dim) or as Parquet with the columns `id` and `vectors`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jobs
from jobs import _queries, _runs
from pipeline.config import SpecError, check_exists
from pipeline.index import check_index

if TYPE_CHECKING:  # loaded when an index is opened: --help is quick
    from pipeline.search.options import SearchOptions
    from pipeline.search.query import AnyQuery
    from pipeline.search.rerank import Reranker
    from pipeline.search.searcher import Searcher

BOLD_UNDERLINED, BRACKETS = ("\x1b[1;4m", "\x1b[0m"), ("[", "]")

#: The values of `pipeline.schema.Precision`, whose module imports Arrow.
PRECISIONS = ("float32", "bfloat16", "float16", "int8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and searches."""
    args = _parse(arguments)
    options, queries = _options(args), _queries.read(args)
    _check_outputs(args)
    reranker = _reranker(args)
    with _open(args) as searcher:
        options = options.resolve(searcher.index)
        _print_known(searcher, options, sys.stderr if args.json else sys.stdout)
        if args.query_vectors:
            _queries.check_vectors(searcher, queries, options.column)
        if args.run:
            _runs.write(args.run, searcher, queries, options, reranker)
        else:
            _search(searcher, queries, options, reranker, args)


def _parse(arguments: Sequence[str] | None) -> Namespace:
    """Parses the command line; options that exclude each other end the program."""
    parser = _parser()
    args = parser.parse(arguments)
    for option, given in (("--save-maps", args.save_maps), ("--save-sheet", args.save_sheet)):
        if given and (args.run or args.queries or args.json):
            parser.error(f"{option} requires a single query and no --run or --json")
    for option in ("rerank_depth", "add_first_stage", "precision"):
        if getattr(args, option) and not args.rerank:
            parser.error(f"--{option.replace('_', '-')} requires --rerank edje=FOLDER")
    if args.save_sheet and not (args.query and not args.image):
        parser.error("--save-sheet requires a text query")
    if args.json and args.run:
        parser.error("--json cannot be combined with --run")
    if sum(map(bool, (args.query or args.image, args.queries, args.query_vectors))) != 1:
        several = "QUERY, --image or both, --queries and --query-vectors"
        parser.error(f"exactly one of {several} is required")
    check_index(args.index)
    for option in ("queries", "query_vectors", "image", "ids", "parents"):
        if path := getattr(args, option):
            check_exists(path, option.replace("_", "-"))
    return args


def _options(args: Namespace) -> SearchOptions:
    from pipeline.eval.topics import read_ids
    from pipeline.search.options import SearchOptions

    return SearchOptions.from_keywords(
        args.representation,
        explain=True,
        k=args.k,
        score=args.score,
        weights=tuple(args.weights),
        group_by=args.group_by,
        filter=args.filter,
        ids=args.ids and read_ids(args.ids, "ids"),
        parents=args.parents and read_ids(args.parents, "parents"),
    )


def _check_outputs(args: Namespace) -> None:
    """Raises `SpecError` if an output cannot be written."""
    from pipeline.atomic import check_writable

    if args.run is not None:
        check_writable(args.run, "run", as_file=True)
    if args.save_maps:
        check_writable(args.save_maps, "save-maps")
    if args.save_sheet:
        if not args.save_sheet.lower().endswith(".png"):
            raise SpecError("save-sheet", args.save_sheet, "a file that ends with .png")
        check_writable(args.save_sheet, "save-sheet", as_file=True)


def _reranker(args: Namespace) -> Reranker | None:
    if args.rerank is None:
        return None
    name, _, folder = args.rerank.partition("=")
    if name != "edje" or not folder:
        raise SpecError("rerank", args.rerank, "edje=FOLDER, where FOLDER holds a trained EDJE")
    from pipeline.schema import DEFAULT_RERANK_DEPTH
    from pipeline.search.rerank import Reranker

    depth = args.rerank_depth or DEFAULT_RERANK_DEPTH
    return Reranker(folder, depth, args.add_first_stage, args.precision)


@contextlib.contextmanager
def _open(args: Namespace) -> Iterator[Searcher]:
    """Opens the index in this process or in Ray actors."""
    from pipeline.search.searcher import open_index

    if args.actors is None:
        yield open_index(args.index, args.version, cache=args.cache, device=args.device)
        return
    from pipeline.search.sharded import ShardedSearcher, machine_shares

    with jobs.cluster():
        shares = machine_shares(args.actors, args.device)
        with ShardedSearcher(
            args.index,
            args.version,
            num_shards=args.actors,
            cache=args.cache,
            device=args.device,
            **shares,
        ) as searcher:
            yield searcher


def _print_known(searcher: Searcher, options: SearchOptions, file: Any) -> None:
    """Prints how many of the ids that restrict the search are in the index."""
    lists = {"ids": options.ids, "parents": options.parents}
    for field, ids in lists.items():
        if ids is not None:
            known = searcher.items.num_known(ids, field)
            print(f"{field}: {known:,} of {len(ids):,} are in the index", file=file)


def _search(
    searcher: Searcher,
    queries: Mapping[str, AnyQuery],
    options: SearchOptions,
    reranker: Reranker | None,
    args: Namespace,
) -> None:
    """Searches for each query; prints the hits and writes their maps."""
    from pipeline.search.formatting import format_hits
    from pipeline.search.map_files import write_hit_maps, write_hit_sheet

    for batch in _runs.batches(queries):
        found = searcher.search_with(list(batch.values()), options, reranker)
        for (query_id, query), hits in zip(batch.items(), found, strict=True):
            if args.json:
                for hit in hits:
                    print(json.dumps({"query_id": query_id, **asdict(hit)}, ensure_ascii=False))
                continue
            if len(queries) > 1:
                print(f"\n{query_id}: {query if isinstance(query, str) else 'vectors'}")
            print(format_hits(hits, BOLD_UNDERLINED if sys.stdout.isatty() else BRACKETS))
            if num_tokens := max(
                (hit.reranked.num_truncated_tokens for hit in hits if hit.reranked), default=0
            ):
                what = "the query" if isinstance(query, str) else "a hit's text"
                problem = "longer than what the reranker reads: these are cut"
                print(f"{what} is {num_tokens:,} tokens {problem}")
            if args.save_maps:
                moved = (named.rpartition("=") for named in args.documents)
                documents = {name: folder for name, _, folder in moved}
                for line in write_hit_maps(
                    args.save_maps, searcher, query, hits, options.column, documents
                ):
                    print(line)
            if args.save_sheet and isinstance(query, str):
                print(write_hit_sheet(args.save_sheet, searcher, query, hits, options))


def _parser() -> jobs.Parser:
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="the URI of an index")
    parser.add_argument("query", nargs="*", default=[], help="a text")
    parser.add_argument(
        "--image", metavar="FILE", help="a picture: PNG, JPEG or WebP; with QUERY, both together"
    )
    parser.add_argument("--queries", metavar="FILE", help="texts: .jsonl, or id<TAB>text")
    parser.add_argument("--query-vectors", metavar="FILE", help="vectors: .npy or .parquet")
    parser.add_argument("--representation", help="default: full if there is one, else the first")
    parser.add_argument("-k", "--k", type=jobs.positive, default=10, help="hits for each query")
    parser.add_argument("--score", choices=["late", "single", "hybrid"], default="late")
    parser.add_argument(
        "--weights",
        nargs=2,
        type=float,
        default=(1.0, 1.0),
        metavar=("SINGLE", "LATE"),
        help="of the two in the hybrid score; default: 1 1",
    )
    parser.add_argument("--group-by", choices=["parent"], help="the best item of each parent only")
    parser.add_argument("--filter", metavar="SQL", help="SQL condition that items must satisfy")
    parser.add_argument("--ids", metavar="FILE", help="search these items alone: an id a line")
    parser.add_argument("--parents", metavar="FILE", help="the same with ids of parents")
    parser.add_argument("--version", type=int, help="an older version of the index")
    parser.add_argument("--rerank", metavar="edje=FOLDER", help="a second stage: a trained EDJE")
    parser.add_argument(
        "--rerank-depth", type=jobs.positive, help="number of reranked hits; default: 10"
    )
    parser.add_argument(
        "--add-first-stage", action="store_true", help="add its score to the reranker's"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="in which the reranker computes; default: as its folder says",
    )
    parser.add_argument("--actors", type=jobs.positive, metavar="N", help="search N parts on Ray")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="that scores")
    parser.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="read the vectors into memory; default: pack them into MAXRAY_CACHE and map them",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each hit")
    parser.add_argument("--run", metavar="OUT", help="write a TREC run, print no hits")
    parser.add_argument("--save-maps", metavar="FOLDER", help="write similarity maps of the hits")
    parser.add_argument("--save-sheet", metavar="FILE", help="write the hits side by side, a PNG")
    parser.add_argument(
        "--documents",
        metavar="[COLLECTION=]FOLDER",
        action="append",
        default=[],
        help="where the files of the hits lie now; may stand several times",
    )
    return parser


if __name__ == "__main__":
    jobs.run(main)
