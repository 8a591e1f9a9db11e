"""Searches an index for one query or for a file of queries.

    maxray search papers/ "how does a slipstream change the lift of a wing"
    maxray search out/cranfield/index "how does a slipstream change the lift of a wing"
    maxray search INDEX "a query" --representation hpool_32 --k 5 --score hybrid
    maxray search INDEX "a query" --representation kcenter_progressive_64@16
    maxray search INDEX "a query" --score hybrid --weights 1 0.5
    maxray search INDEX "a query" --group-by parent --filter "modality = 'text'"
    maxray search INDEX "a query" --ids ids.txt --json
    maxray search INDEX "a query" --candidates ivf --num-candidates 1000
    maxray search INDEX "a query" --candidates ivf+bm25 --score fused
    maxray search INDEX "a query" --score fused --fusion weights.bm25=0.25
    maxray search INDEX --queries queries.jsonl --k 100 --run out/full.trec
    maxray search INDEX --queries queries.jsonl --run out/full.trec --actors 4
    maxray search INDEX "a query" --rerank edje model=out/edje/model top=20
    maxray search INDEX "a query" --rerank cross_encoder model=cross-encoder/ms-marco-MiniLM-L6-v2
    maxray search INDEX --image photo.jpg
    maxray search INDEX "but in red" --image photo.jpg
    maxray search INDEX --audio question.wav        # a spoken question, or sounds like these
    maxray search INDEX --video clip.mp4
    maxray search INDEX "a car on a road" --not "a red car" --negative-weight 0.3
    maxray search INDEX --query-vectors query.npy
    maxray search FEDERATION.yaml "a query"         # several indexes as one
    maxray search out/pages/index "who pays for the repairs" --k 3 --save-maps out/maps
    maxray search INDEX "a red car" --rerank edje model=FOLDER --k 5 --save-sheet out/red.png

Prints the hits with their best passages. The words that contribute most to the score are marked,
followed by the box or the times of each passage. --json prints one JSON object per hit with all
matches and passages, see docs/concepts/explanations.md.

--run writes a run in TREC format instead and prints the throughput. --actors splits the index into
N shards and searches each in a Ray actor.

--candidates scores only the items that a candidate generator of `maxray add` finds, or several
generators joined by +. The search is faster and may miss hits.

--score fused combines the rankings by MaxSim and BM25, which requires `maxray add candidates INDEX
bm25`. --fusion sets its weights, which it requires; `jobs.evaluate --fit-fusion` fits them to
judged queries.

FEDERATION.yaml has `members`, the indexes that are searched as one, with their options and weights.
See docs/tutorials/federation.md. A member that fails is reported, and the others are searched.

NAME@K searches the first K vectors of each item of a representation with nested vectors.

--rerank reorders the best `top` hits (10) with a model that reads the query and each hit together.
Its arguments are the name of a reranker and the fields of its spec. If repeated, each reranker
reorders the best hits of the one before. Hits that cannot be read keep their ranks and are flagged.
See docs/tutorials/reranking.md.

--save-maps writes the page, image, video frame or audio waveform of each hit as a PNG with the
matching words highlighted, for the whole query and for each query token, and the values as JSON.
--save-sheet writes the images of all hits to one PNG, with a row per stage if --rerank is used.

The files of --ids and --parents have one id per line. Query files contain JSON lines (`_id`,
`text`) or lines of the form `id<TAB>text`. Query vectors are a .npy file of shape (query tokens,
dim) or a Parquet file with the columns `id` and `vectors`. --fusion takes a file of `jobs.evaluate
--fit-fusion`, assignments such as weights.bm25=0.5, or both.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jobs
from jobs import _queries, _runs
from pipeline.config import Assigned, SpecError, check_exists
from pipeline.index import check_index, find_index
from pipeline.search.scores import SCORES

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.search.options import SearchOptions
    from pipeline.search.query import AnyQuery
    from pipeline.search.rerankers import Reranker
    from pipeline.search.results import Hit
    from pipeline.search.searcher import Searcher

BOLD_UNDERLINED, BRACKETS = ("\x1b[1;4m", "\x1b[0m"), ("[", "]")

#: Fields of `SearchOptions` that are flags, in the order of --help, with further arguments of
#: `add_argument`. `config.parse` converts values of the type `Assigned` to the type of their field.
FLAGS: dict[str, dict[str, Any]] = {
    "representation": {"metavar": "NAME"},
    "k": {"type": Assigned, "metavar": "K"},
    "score": {"choices": SCORES},
    "weights": {"type": Assigned, "nargs": 2, "metavar": ("SINGLE_VECTOR", "MAXSIM")},
    "negative_weight": {"type": Assigned, "metavar": "W"},
    "fusion": {"nargs": "+", "metavar": ("FILE", "FIELD=VALUE")},
    "group_by": {"choices": ["parent"]},
    "filter": {"metavar": "SQL"},
    "ids": {"metavar": "FILE"},
    "parents": {"metavar": "FILE"},
    "candidates": {"metavar": "GENERATOR"},
    "num_candidates": {"type": Assigned, "metavar": "N"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and searches."""
    args = _parse(arguments)
    options, queries = _options(args), _queries.read(args)
    _check_outputs(args)
    rerankers = _rerankers(args)
    if jobs.is_spec(args.index):
        _search_federation(queries, options, rerankers, args)
        return
    with _open(args) as searcher:
        _hint(searcher, options)
        given = options
        options = options.resolve(searcher.index, searcher.device)
        _print_known(searcher, options, sys.stderr if args.json else sys.stdout)
        if args.query_vectors:
            _queries.check_vectors(searcher, queries, options.column)
        if args.run:
            _runs.write(args.run, searcher, queries, options, rerankers, args.negative)
        else:
            _search(searcher, queries, given, options, rerankers, args)


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = _parser()
    args = parser.parse(arguments)
    for option, path in (("--save-maps", args.save_maps), ("--save-sheet", args.save_sheet)):
        if path and (args.run or args.queries or args.json):
            parser.error(f"{option} requires a single query and no --run or --json")
    files = [getattr(args, part) for part in _queries.FILES]
    if args.save_sheet and not (args.query and not any(files)):
        parser.error("--save-sheet requires a text query")
    if args.json and args.run:
        parser.error("--json cannot be combined with --run")
    if sum(map(bool, (args.query or any(files), args.queries, args.query_vectors))) != 1:
        parser.error(
            "exactly one of these is required: QUERY, --image, --audio or --video, or a "
            "combination of these; --queries; or --query-vectors"
        )
    if jobs.is_spec(args.index):
        check_exists(args.index, "index")
        others = ("version", "actors", "save_maps", "save_sheet", "documents")
        for option in (*others, "negative"):
            if getattr(args, option):
                name = "not" if option == "negative" else option.replace("_", "-")
                parser.error(f"--{name} cannot be used with a federation")
    else:
        args.index = find_index(args.index)
        check_index(args.index)
    for option in ("queries", "query_vectors", *_queries.FILES, "ids", "parents"):
        if path := getattr(args, option):
            check_exists(path, option.replace("_", "-"))
    return args


def _options(args: Namespace) -> SearchOptions:
    from pipeline import config
    from pipeline.eval.topics import read_ids
    from pipeline.search.options import SearchOptions

    fields = {name: vars(args)[name] for name in SearchOptions.model_fields if name in FLAGS}
    given = {name: value for name, value in fields.items() if value is not None}
    given |= {name: read_ids(given[name], name) for name in ("ids", "parents") if name in given}
    if assignments := given.pop("fusion", None):
        is_file = "=" not in assignments[0]
        settings = config.read(assignments[0], "fusion") if is_file else {}
        given["fusion"] = config.override(settings, assignments[is_file:])
    return config.parse(SearchOptions, {**given, "explain": "matches"})


def _check_outputs(args: Namespace) -> None:
    from pipeline.runtime.atomic import check_writable

    if args.run is not None:
        check_writable(args.run, "run", as_file=True)
    if args.save_maps:
        check_writable(args.save_maps, "save-maps")
    if args.save_sheet:
        if not args.save_sheet.lower().endswith(".png"):
            raise SpecError("save-sheet", args.save_sheet, "a file that ends with .png")
        check_writable(args.save_sheet, "save-sheet", as_file=True)


def _rerankers(args: Namespace) -> Sequence[Reranker[Any]]:
    if args.rerank is None:
        return ()
    from pipeline.config import override
    from pipeline.search.rerankers import load_rerankers

    specs = [override({"name": name}, assignments) for name, *assignments in args.rerank]
    return load_rerankers(specs if len(specs) > 1 else specs[0])


@contextlib.contextmanager
def _open(args: Namespace) -> Iterator[Searcher]:
    """Opens the index, either in this process or in Ray actors."""
    from pipeline.search.searcher import open_index

    if args.actors is None:
        yield open_index(args.index, args.version, cache=args.cache, device=args.device)
        return
    from pipeline.search.sharded import ShardedSearcher, actor_resources

    with jobs.cluster():
        resources = actor_resources(args.actors, args.device)
        with ShardedSearcher(
            args.index,
            args.version,
            num_shards=args.actors,
            cache=args.cache,
            device=args.device,
            **resources,
        ) as searcher:
            yield searcher


def _hint(searcher: Searcher, options: SearchOptions) -> None:
    from pipeline.search.candidates import AUTO, slow_search_hint

    selects = options.filter or options.ids is not None or options.parents is not None
    if options.candidates == AUTO and options.score == "maxsim" and not selects:
        info = searcher.representation(options.representation)
        if hint := slow_search_hint(searcher.index, info, searcher.device):
            print(hint, file=sys.stderr)


def _print_known(searcher: Searcher, options: SearchOptions, file: Any) -> None:
    lists = {"ids": options.ids, "parents": options.parents}
    for field, ids in lists.items():
        if ids is not None:
            known = searcher.items.num_known(ids, field)
            print(f"{field}: {known:,} of {len(ids):,} are in the index", file=file)


def _search(
    searcher: Searcher,
    queries: Mapping[str, AnyQuery],
    given: SearchOptions,
    options: SearchOptions,
    rerankers: Sequence[Reranker[Any]],
    args: Namespace,
) -> None:
    from pipeline.search.map_files import write_hit_maps, write_hit_sheet
    from pipeline.search.stored_items import token_representation

    info = searcher.representation(options.column)
    is_merged = info.assignment_form == "assignment"
    is_ambiguous = is_merged and token_representation(searcher.index, info) is None
    for batch in _runs.batches(queries):
        hits_of_queries = searcher.search_with(
            list(batch.values()), given, rerankers, args.negative
        )
        for (query_id, query), hits in zip(batch.items(), hits_of_queries, strict=True):
            _print_hits(query_id, query, hits, args, is_single=len(queries) == 1)
            if args.json:
                continue
            if is_ambiguous and hits:
                print(
                    f"{options.column} merges words, and the index has no vectors of single words: "
                    "the marked words are some of those that a matching vector represents",
                    file=sys.stderr,
                )
            _print_truncated(query, hits, args)
            if args.save_maps:
                pairs = (option.rpartition("=") for option in args.documents)
                documents = {name: folder for name, _, folder in pairs}
                for line in write_hit_maps(
                    args.save_maps, searcher, query, hits, options.column, documents
                ):
                    print(line)
            if args.save_sheet and isinstance(query, str):
                print(write_hit_sheet(args.save_sheet, searcher, query, hits, options))


def _print_hits(
    query_id: str, query: AnyQuery, hits: Sequence[Hit], args: Namespace, *, is_single: bool
) -> None:
    from pipeline.search.formatting import format_hits

    if args.json:
        is_ascii = (sys.stdout.encoding or "utf-8").lower() != "utf-8"
        for hit in hits:
            row = {"query_id": query_id, **hit.model_dump(mode="json")}
            print(json.dumps(row, ensure_ascii=is_ascii))
        return
    if not is_single:
        print(f"\n{query_id}: {query if isinstance(query, str) else 'vectors'}")
    print(format_hits(hits, BOLD_UNDERLINED if sys.stdout.isatty() else BRACKETS))


def _print_truncated(query: AnyQuery, hits: Sequence[Hit], args: Namespace) -> None:
    num_tokens = max((hit.rerank.num_truncated_tokens for hit in hits if hit.rerank), default=0)
    if num_tokens and not args.json:
        text = "the query" if isinstance(query, str) else "the text of a hit"
        print(f"the reranker truncated {text} by {num_tokens:,} tokens")


def _search_federation(
    queries: Mapping[str, AnyQuery],
    options: SearchOptions,
    rerankers: Sequence[Reranker[Any]],
    args: Namespace,
) -> None:
    """Searches the members of a federation and prints their joined hits, or writes a run."""
    from pipeline.eval.metrics import write_run
    from pipeline.search.federated import FederatedSearcher

    searcher = FederatedSearcher(args.index, cache=args.cache, device=args.device)
    reported: set[str] = set()

    def warn(sentences: Sequence[str]) -> None:
        for sentence in sentences:
            if sentence not in reported:
                print(f"warning: {sentence}", file=sys.stderr)
        reported.update(sentences)

    def scores() -> Iterator[tuple[str, dict[str, float]]]:
        for batch in _runs.batches(queries):
            rankings = searcher.rank_with([*batch.values()], options, rerankers=rerankers)
            warn(rankings.warnings)
            for query_id, joined in zip(batch, rankings.joined, strict=True):
                yield query_id, searcher.scores(joined)

    if args.run:
        write_run(args.run, scores(), tag="federation")
        print(f"{len(queries):,} queries: {args.run}")
        return
    for batch in _runs.batches(queries):
        found, sentences = searcher.search_with([*batch.values()], options, rerankers)
        warn(sentences)
        for (query_id, query), hits in zip(batch.items(), found, strict=True):
            _print_hits(query_id, query, hits, args, is_single=len(queries) == 1)
            _print_truncated(query, hits, args)


def _parser() -> jobs.Parser:
    from pipeline.search.options import SearchOptions

    parser = jobs.parser(__doc__)
    parser.add_argument(
        "index", help="URI of the index, the folder that it is beside, or a federation (.yaml)"
    )
    parser.add_argument("query", nargs="*", default=[], help="text query")
    parser.add_argument(
        "--image",
        metavar="FILE",
        help="query image (PNG, JPEG or WebP); with QUERY, a composed query of both",
    )
    for part in ("audio", "video"):
        help = f"query {part}; encoders of texts read its speech"
        parser.add_argument(f"--{part}", metavar="FILE", help=help)
    parser.add_argument(
        "--not",
        dest="negative",
        metavar="TEXT",
        help="text that the hits should not match, see --negative-weight",
    )
    parser.add_argument("--queries", metavar="FILE", help="text queries (.jsonl or id<TAB>text)")
    parser.add_argument("--query-vectors", metavar="FILE", help="query vectors (.npy or .parquet)")
    for name, settings in FLAGS.items():
        field = SearchOptions.model_fields[name]
        words = " ".join((field.description or "").replace("`", "").split())
        text, _, default = words.partition(" Default: ")
        if isinstance(value := field.get_default(), str | int | tuple):
            default = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        text = text.partition(". ")[0].rstrip(".")
        text += f" (default: {default.rstrip('.')})" if default else ""
        flags = ["-k"] * (name == "k") + [f"--{name.replace('_', '-')}"]
        parser.add_argument(*flags, dest=name, help=text.replace("%", "%%"), **settings)
    parser.add_argument("--version", type=int, help="version of the index (default: the newest)")
    parser.add_argument(
        "--rerank",
        nargs="+",
        action="append",
        metavar=("NAME", "FIELD=VALUE"),
        help="reranker and the fields of its spec, such as model=FOLDER top=20; may be repeated",
    )
    parser.add_argument(
        "--actors", type=jobs.positive, metavar="N", help="search N shards in Ray actors"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="device used for scoring (default: cpu)",
    )
    parser.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="read vectors into memory instead of mapping packed files in MAXRAY_CACHE",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per hit")
    parser.add_argument("--run", metavar="OUT", help="write a TREC run instead of printing hits")
    parser.add_argument("--save-maps", metavar="FOLDER", help="write similarity maps of the hits")
    parser.add_argument(
        "--save-sheet", metavar="FILE", help="write the images of all hits to one PNG"
    )
    parser.add_argument(
        "--documents",
        metavar="[COLLECTION=]FOLDER",
        action="append",
        default=[],
        help="current folder of the indexed files, if they were moved; may be repeated",
    )
    return parser


if __name__ == "__main__":
    jobs.run(main)
