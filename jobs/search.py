"""Searches an index, for one query or for a file of them.

    python -m jobs.search out/cranfield/index "how does a slipstream change the lift of a wing"
    python -m jobs.search INDEX "a query" --representation hpool_32 --k 5 --score hybrid
    python -m jobs.search INDEX "a query" --score hybrid --weights 1 0.5
    python -m jobs.search INDEX "a query" --group-by parent --where "modality = 'text'"
    python -m jobs.search INDEX "a query" --ids ids.txt --json
    python -m jobs.search INDEX --queries queries.jsonl --k 100 --run out/full.trec
    python -m jobs.search INDEX --queries queries.jsonl --run out/full.trec --actors 4
    python -m jobs.search INDEX "a query" --score single --rerank edje=out/edje/model --pool 20
    python -m jobs.search INDEX --image photo.jpg
    python -m jobs.search INDEX "but in red" --image photo.jpg
    python -m jobs.search INDEX --query-vectors query.npy
    python -m jobs.search out/pages/index "who pays for the repairs" --k 3 --save-maps out/maps
    python -m jobs.search INDEX "a red car" --rerank edje=FOLDER --k 5 --save-sheet out/red.png

Prints hits with their best passages: the words that contribute most to the score are marked, and
below stand the box or the seconds of each passage. With --json each hit is a line of JSON with all
matches and passages (docs/explanations.md).
With --run it writes a run in TREC's form instead, and says how many queries were encoded and scored
a second. With --actors the index is searched in so many parts, each in a Ray actor.
With --rerank the best hits (10, or --pool) are put into the order of EDJE's joint encoder, which
reads the query with what its adapter made of each, see jobs.backfill; for a picture with the texts
of the hits. A hit that it cannot read keeps its place and says so.
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
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jobs
from pipeline.config import SpecError, Stopped, check_exists
from pipeline.index import check_index

if TYPE_CHECKING:  # loaded when an index is opened: --help is quick
    import numpy as np

    from pipeline.schema import Composed, Hit, Parts, Place, Reranked
    from pipeline.search.rerank import Reranker
    from pipeline.search.searcher import AnyQuery, Ranking, Searcher

BOLD_UNDERLINED, BRACKETS = ("\x1b[1;4m", "\x1b[0m"), ("[", "]")

#: Queries of a file that are encoded and scored together: bounds memory, however many there are.
QUERIES_AT_ONCE = 256
#: Of a query's picture.
MOST_IMAGE_BYTES = 64 << 20
#: As `pipeline.schema.Precision` has them, whose module imports Arrow.
PRECISIONS = ("float32", "bfloat16", "float16", "int8")
#: Seconds between two lines of progress.
SAY_EVERY = 10.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and searches."""
    parser = _parser()
    args = parser.parse(arguments)
    for option, given in (("--save-maps", args.save_maps), ("--save-sheet", args.save_sheet)):
        if given and (args.run or args.queries or args.json):
            parser.error(f"{option} is for one query, without --run and --json")
    for option in ("pool", "add_first_stage", "precision"):
        if getattr(args, option) and not args.rerank:
            parser.error(f"--{option.replace('_', '-')} is for --rerank edje=FOLDER")
    if args.save_sheet and not (args.query and not args.image):
        parser.error("--save-sheet is for a query in words")
    if args.json and args.run:
        parser.error("--json is of printed hits, without --run")
    if sum(map(bool, (args.query or args.image, args.queries, args.query_vectors))) != 1:
        several = "QUERY, --image or both, --queries and --query-vectors"
        parser.error(f"one of {several} is needed, and only one")
    check_index(args.index)
    for option in ("queries", "query_vectors", "image", "ids", "parents"):
        if path := getattr(args, option):
            check_exists(path, option.replace("_", "-"))

    from pipeline.atomic import check_writable
    from pipeline.eval.topics import read_ids, read_queries, read_query_vectors
    from pipeline.search.searcher import check_weights

    check_weights(tuple(args.weights), args.score)
    if args.queries:
        queries = read_queries(args.queries)
    elif args.query_vectors:
        queries = read_query_vectors(args.query_vectors)
        if args.save_maps and len(queries) > 1:
            problem = f"holds {len(queries):,} queries"
            raise SpecError("query-vectors", args.query_vectors, "one with --save-maps", problem)
    else:
        queries = {"1": _query(args.query, args.image)}
    named = {field: getattr(args, field) for field in ("ids", "parents")}
    named = {field: path and read_ids(path, field) for field, path in named.items()}
    if args.run is not None:
        check_writable(args.run, "run", as_file=True)
    if args.save_maps:
        check_writable(args.save_maps, "save-maps")
    if args.save_sheet:
        if not args.save_sheet.lower().endswith(".png"):
            raise SpecError("save-sheet", args.save_sheet, "a file that ends with .png")
        check_writable(args.save_sheet, "save-sheet", as_file=True)
    rerank = _reranker(args)
    with _opened(args) as searcher:
        _search(searcher, queries, named, args, rerank)


def _reranker(args: Any) -> Reranker | None:
    """The second stage, if one is asked for."""
    if args.rerank is None:
        return None
    name, _, folder = args.rerank.partition("=")
    if name != "edje" or not folder:
        raise SpecError("rerank", args.rerank, "edje=FOLDER, that of a trained EDJE")
    from pipeline.schema import POOL
    from pipeline.search.rerank import Reranker

    return Reranker(folder, args.pool or POOL, args.add_first_stage, args.precision)


def _query(words: Sequence[str], image: str | None) -> str | bytes | Composed:
    """The query of a command line: a text, a picture, or both together."""
    from pipeline.schema import Composed

    text = " ".join(words)
    if image is None:
        return text
    picture = _read_image(image)
    return Composed(text, picture) if words else picture


def _read_image(uri: str) -> bytes:
    """A picture's file.

    Raises:
        SpecError: it is not there, or too large to be one.
    """
    import fsspec

    legal = f"a PNG, JPEG or WebP file of {MOST_IMAGE_BYTES:,} bytes at most"
    try:
        with fsspec.open(uri) as file:
            data = file.read(MOST_IMAGE_BYTES + 1)
    except OSError as error:
        raise SpecError("image", uri, legal, f"cannot be read ({error})") from None
    if len(data) > MOST_IMAGE_BYTES:
        raise SpecError("image", uri, legal, "is too large")
    return data


@contextlib.contextmanager
def _opened(args: Any) -> Iterator[Searcher]:
    """The index, in this process or in Ray actors."""
    from pipeline.search.searcher import open_index

    if args.actors is None:
        yield open_index(args.index, args.version, cache=args.cache, device=args.device)
        return
    from pipeline.search.sharded import ShardedSearcher

    how = {"num_shards": args.actors, "cache": args.cache, "device": args.device}
    with jobs.cluster():
        how |= _shares(args.actors, args.device)
        with ShardedSearcher(args.index, args.version, **how) as searcher:
            yield searcher


def _shares(num_actors: int, device: str) -> dict[str, float]:
    """What of the machine each actor takes.

    Of a cluster that others started one CPU and GPU each, which it may have to wait for. One that
    was started here never has more than this machine: the actors share it.

    Raises:
        SpecError: they need a GPU, and there is none.
    """
    if os.environ.get("RAY_ADDRESS"):
        return {}
    import ray

    there = ray.cluster_resources()
    if device != "cpu" and not there.get("GPU"):
        raise SpecError("device", device, "cpu", "is not there")
    num_gpus = there["GPU"] if device != "cpu" else 0
    # Ray keeps four digits: rounded up, so many would not find a place.
    share = {"num_cpus": there["CPU"] / num_actors, "num_gpus": num_gpus / num_actors}
    return {name: min(1.0, math.floor(part * 1e4) / 1e4) for name, part in share.items()}


def _search(
    searcher: Searcher,
    queries: Mapping[str, Any],
    named: Mapping[str, list[str] | None],
    args: Any,
    rerank: Reranker | None,
) -> None:
    """Searches for each query, and writes the run, or prints the hits and writes their maps."""
    name, _ = searcher.representation(args.representation)
    for field, ids in named.items():
        if ids is not None:
            known = f"{field}: {searcher.num_known(ids, field):,} of {len(ids):,} are in the index"
            print(known, file=sys.stderr if args.json else sys.stdout)
    if args.query_vectors:
        _check_vectors(searcher, queries, name)
    restricted = {"where": args.where, **named}
    how = {"representation": name, "k": args.k, "group_by": args.group_by, **restricted}
    how |= {"score": args.score, "weights": tuple(args.weights)}
    if args.run:
        num_items = searcher.num_items(**restricted)
        _write_run(args.run, searcher, queries, num_items, how, rerank)
        return
    for part in _some_at_a_time(queries):
        found = searcher.search(list(part.values()), rerank=rerank, **how)
        for (query_id, query), hits in zip(part.items(), found, strict=True):
            if args.json:
                for hit in hits:
                    print(json.dumps({"query_id": query_id, **asdict(hit)}, ensure_ascii=False))
                continue
            if len(queries) > 1:
                print(f"\n{query_id}: {query if isinstance(query, str) else 'vectors'}")
            print(page(hits, BOLD_UNDERLINED if sys.stdout.isatty() else BRACKETS))
            if cut := [hit.reranked.num_cut for hit in hits if hit.reranked]:
                _say_cut(query, max(cut))
            if args.save_maps:
                write_maps(searcher, query, hits, name, args.save_maps, args.documents)
            if args.save_sheet:
                _write_sheet(args.save_sheet, searcher, query, hits, how)


def _write_sheet(
    file: str, searcher: Searcher, query: str, hits: Sequence[Hit], how: Mapping[str, Any]
) -> None:
    """Writes what hits look like; those that were reranked, below those of the first stage."""
    from pipeline.atomic import write_atomic
    from pipeline.search.maps import hit_sheet

    if not hits:
        print("sheet: none; there are no hits")
        return
    first = f"{how['representation']}, {how['score']} score"
    rows = [(first, hits)]
    if any(hit.reranked for hit in hits):
        rows = [(first, searcher.search([query], **how)[0]), ("reranked", hits)]
    sheet, num_missing = hit_sheet(searcher, query, rows)
    write_atomic(file, sheet)
    missing = f"; {num_missing} of its hits have no picture that can be read" if num_missing else ""
    print(f"sheet: {file}{missing}")


def _say_cut(query: Any, num_cut: int) -> None:
    """Says that the joint encoder did not read a text to its end."""
    if num_cut:
        what = "the query" if isinstance(query, str) else "a hit's text"
        print(f"{what} is {num_cut:,} tokens longer than what the reranker reads: these are cut")


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
    parser.add_argument("--where", metavar="SQL", help="a Lance filter over the items' columns")
    parser.add_argument("--ids", metavar="FILE", help="search these items alone: an id a line")
    parser.add_argument("--parents", metavar="FILE", help="the same with ids of parents")
    parser.add_argument("--version", type=int, help="an older version of the index")
    parser.add_argument("--rerank", metavar="edje=FOLDER", help="a second stage: a trained EDJE")
    parser.add_argument("--pool", type=jobs.positive, help="hits that are reranked; default: 10")
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


def _check_vectors(searcher: Searcher, queries: Mapping[str, np.ndarray], name: str) -> None:
    """Raises `SpecError` if a query of a file is none: before others of it take their time."""
    for query_id, vectors in queries.items():
        try:
            searcher.queries([vectors], name)
        except SpecError as error:
            if error.field != "query":  # the index is damaged
                raise
            problem = f"holds {error.value}"
            raise SpecError("query-vectors", query_id, error.legal, problem) from None


def _some_at_a_time(queries: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The queries, so many at a time that memory is bounded."""
    pairs = list(queries.items())
    for first in range(0, len(pairs), QUERIES_AT_ONCE):
        yield dict(pairs[first : first + QUERIES_AT_ONCE])


def _write_run(
    out: str,
    searcher: Searcher,
    queries: Mapping[str, Any],
    num_items: int,
    how: Mapping[str, Any],
    rerank: Reranker | None,
) -> None:
    """Ranks the items for all queries, writes the run, and says how quick that was."""
    from pipeline.eval.metrics import write_run
    from pipeline.search.searcher import EQUAL

    signal.signal(signal.SIGTERM, _stop)
    rank = _Rank(searcher, queries, how, rerank)
    print(f"{len(queries):,} queries x {num_items:,} items", flush=True)
    weights = "".join(f"-{weight:g}" for weight in how["weights"] if how["weights"] != EQUAL)
    tag = f"{how['representation']}.{how['score']}{weights}{'.edje' if rerank else ''}"
    write_run(out, rank.scores(), tag=tag)
    print(f"{rank.speed()}\n{len(queries):,} queries, {rank.num_hits:,} hits: {out}")


class _Rank:
    """Ranks for many queries, and keeps the time.

    Args:
        how: what `Searcher.rank` takes.
        rerank: the second stage, if there is one.
    """

    def __init__(
        self,
        searcher: Searcher,
        queries: Mapping[str, Any],
        how: Mapping[str, Any],
        rerank: Reranker | None,
    ):
        from pipeline.schema import Composed

        self._searcher, self._queries, self._how = searcher, queries, dict(how)
        self._rerank, self._k = rerank, how["k"]
        if rerank is not None:
            rerank.check(searcher.index, list(queries.values()))
            self._how["k"] = max(self._k, rerank.pool)
        self._are_encoded = all(
            isinstance(query, str | bytes | Composed) for query in queries.values()
        )
        self._encoding = self._scoring = self._reranking = 0.0  # seconds
        self._done = self.num_hits = 0

    def scores(self) -> Iterator[tuple[str, dict[str, float]]]:
        """The ids of the queries and what they found, best first."""
        name = self._how["representation"]
        if self._are_encoded:
            self._searcher.encoder(name)  # what is loaded once is not timed
        self._searcher.load(name, self._how["score"])
        said = time.monotonic()
        for part in _some_at_a_time(self._queries):
            rankings = self._rank(list(part.values()))
            for query_id, ranking in zip(part, rankings, strict=True):
                grouped = self._how["group_by"]
                scores = ranking.scores_by_parent() if grouped else ranking.scores_by_item()
                self.num_hits += len(scores)
                yield query_id, scores
            self._done += len(part)
            if self._done < len(self._queries) and time.monotonic() - said > SAY_EVERY:
                said = time.monotonic()
                jobs.say(f"{self._done:,} of {len(self._queries):,} queries; {self.speed()}")

    def _rank(self, queries: list[Any]) -> list[Ranking]:
        start = time.perf_counter()
        ready = self._searcher.queries(queries, self._how["representation"])
        encoded = time.perf_counter()
        rankings = self._searcher.rank(ready, **self._how)
        ranked = time.perf_counter()
        self._encoding += encoded - start
        self._scoring += ranked - encoded
        if self._rerank is not None:
            rankings = self._rerank.rerank(self._searcher, queries, rankings, self._k)
            self._reranking += time.perf_counter() - ranked
        return rankings

    def speed(self) -> str:
        """How many queries were encoded and scored a second."""
        scored = f"scored {self._done / self._scoring:,.1f} queries/s"
        encoded = f"encoded {self._done / self._encoding:,.1f} queries/s, "
        if self._rerank is not None:
            scored += f", reranked {self._done / self._reranking:,.1f} queries/s"
        return (encoded if self._are_encoded else "") + scored


def _stop(*_: object) -> None:
    raise Stopped("stopped; nothing was written")


def write_maps(
    searcher: Searcher,
    query: AnyQuery,
    hits: Sequence[Hit],
    representation: str,
    folder: str,
    documents: Sequence[str],
) -> None:
    """Writes the similarity maps of hits and says where, or why a hit has none.

    Raises:
        SpecError: no hit has one; as the first says.
    """
    from pipeline.schema import Composed, Place
    from pipeline.search import maps
    from pipeline.search.explain import NO_SPAN, printable

    moved = (named.rpartition("=") for named in documents)
    previews = maps.Previews(searcher.index, {name: where for name, _, where in moved})
    text = query.text if isinstance(query, Composed) else query
    shown = text if isinstance(text, str) else "image" if isinstance(query, bytes) else "vectors"
    errors = []
    for hit in hits:
        try:
            map = maps.similarity_map(searcher, query, hit.item_id, representation)
            maps.write_maps(folder, hit.rank, previews, map, shown)
        except SpecError as error:
            errors.append(error)
            if len(errors) < len(hits):
                print(f"map {hit.rank}: none; {error}")
            continue
        best = map.best_word()
        brightest = printable(best.text) or place(Place(NO_SPAN, best.box, best.times))
        print(f"map {hit.rank}: {folder}/{hit.rank}.png; brightest: {brightest}")
    if errors and len(errors) == len(hits):
        raise errors[0]


def page(hits: Sequence[Hit], marks: tuple[str, str]) -> str:
    """The hits of a query for reading: rank, score, id, place, title, and a snippet below."""
    from pipeline.search.explain import highlights, printable, snippet

    if not hits:
        return "no hits"
    lines = []
    for hit in hits:
        head = [f"{hit.rank:3}  {hit.score:8.4f}", hit.item_id, span(hit.span), hit.title or ""]
        head.append(moved(hit.reranked))
        lines.append("  ".join(printable(part) for part in head if part))
        if made := parts(hit.parts):
            lines.append(f"     {made}")
        marked = highlights(hit.passages[0]) if hit.passages else []
        if hit.text and (shown := snippet(hit.text, marked, marks=marks)):
            lines.append(f"     {shown}")
        if where := "; ".join(filter(None, map(place, hit.passages))):
            lines.append(f"     {where}")
    return "\n".join(lines)


def parts(parts: Parts) -> str:
    """What a score is made of, where it is of more than one part.

    >>> from pipeline.schema import Parts
    >>> parts(Parts(late=4.5, late_mean=0.75, single=0.5)), parts(Parts(late=4.5, late_mean=0.75))
    ('single 0.5000, late 4.5000 (mean 0.7500)', '')
    """
    if parts.late is None or parts.single is None:
        return ""
    return f"single {parts.single:.4f}, late {parts.late:.4f} (mean {parts.late_mean:.4f})"


def moved(reranked: Reranked | None) -> str:
    """Where a reranked hit stood before, and why it stays there if it could not be read.

    >>> from pipeline.schema import Reranked
    >>> moved(Reranked(3, 0.5, 1.25)), moved(Reranked(2, 0.5, problem="has no text")), moved(None)
    ('(was 3)', '(was 2; has no text)', '')
    """
    if reranked is None:
        return ""
    return f"(was {'; '.join(filter(None, [str(reranked.first_rank), reranked.problem]))})"


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

    >>> from pipeline.schema import Place
    >>> place(Place((0, 4), (0.1, 0.25, 0.5, 0.3), (4.0, 6.0)))
    'seen 4.0-6.0 s, box 0.10 0.25 0.50 0.30'
    >>> place(Place((0, 4), None, (5.31, 7.0)))
    'heard 5.3-7.0 s'
    >>> place(Place((0, 4), None, (5.31, 7.0), confidence=0.825))
    'heard 5.3-7.0 s, confidence 0.82'
    """
    parts = []
    if place.times:
        start, end = place.times
        parts.append(f"{'seen' if place.box else 'heard'} {start:.1f}-{end:.1f} s")
    if place.box:
        parts.append("box " + " ".join(f"{side:.2f}" for side in place.box))
    if place.confidence is not None:
        parts.append(f"confidence {place.confidence:.2f}")
    return ", ".join(parts)


if __name__ == "__main__":
    jobs.run(main)
