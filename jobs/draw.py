"""Draws similarity maps, sheets of hits, and attention.

    maxray draw maps PHRASES OUT.png --index INDEX NAME     # similarity maps of phrases
    maxray draw sheets EVALUATION                           # best hits of judged queries
    maxray draw attention OUT.png ITEM --model MODEL        # attention of appended tokens

`maxray draw DRAWING --help` describes the drawing and its arguments.
"""

from __future__ import annotations

import argparse
import posixpath
from collections.abc import Sequence

import jobs
from pipeline.config import SpecError, check_exists
from pipeline.index import check_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws."""
    if jobs.run_form(FORMS, arguments):
        return
    parser = jobs.parser(__doc__)
    parser.add_argument("drawing", choices=FORMS, help="what to draw")
    parser.parse(arguments)


def _maps(arguments: Sequence[str]) -> None:
    """Draws similarity maps of phrases, for comparison with their true locations.

        maxray draw maps PHRASES OUT.png --index out/shapes/index full samer_16
        maxray draw maps PHRASES OUT.png --index INDEX NAME --index OTHER NAME --items a.png b.png

    PHRASES is a JSON Lines file with the fields item_id, phrase and boxes, in the format of
    `grounding` in jobs.evaluate. The output has a row per phrase and a column per representation.
    The boxes of the phrase are outlined.
    """
    parser = jobs.parser(_maps.__doc__, "maps")
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

    from pipeline.eval.grounding import check_phrases, read_phrases
    from pipeline.runtime.atomic import check_writable, write_atomic
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


def _sheets(arguments: Sequence[str]) -> None:
    """Draws the best hits of judged queries, with the relevant ones outlined.

        maxray draw sheets out/shapes/evaluation
        maxray draw sheets EVALUATION --row single_vector --row full.hybrid --count 5 --k 5
        maxray draw sheets EVALUATION --row full.maxsim --queries q1 q7 --output out/sheets

    EVALUATION is the output folder of `jobs.evaluate`. For each query, the folder `sheets` in it,
    or --output, receives a PNG with a row of hits per --row (default: the first and the last row of
    the table). Relevant hits are outlined in green, and in MaxSim and hybrid rows the matches are
    highlighted.

    Without --queries, the queries are those that gain most from the first to the last row in the
    main metric.
    """
    parser = jobs.parser(_sheets.__doc__, "sheets")
    parser.add_argument("evaluation", metavar="EVALUATION", help="output folder of jobs.evaluate")
    parser.add_argument(
        "--row", dest="rows", action="append", metavar="ROW", help="row to draw; may be repeated"
    )
    parser.add_argument("--queries", nargs="+", metavar="ID", help="queries to draw")
    parser.add_argument(
        "--count", type=jobs.positive, default=3, help="number of queries (default: 3)"
    )
    parser.add_argument(
        "--k", type=jobs.positive, default=5, help="number of hits per row (default: 5)"
    )
    parser.add_argument("--output", metavar="FOLDER", help="output folder")
    args = parser.parse_args(arguments)  # `parse` does not support options with several values
    jobs.check_outputs([args.evaluation], "EVALUATION")

    from pipeline.eval.metrics import read_run
    from pipeline.eval.report.match_sheets import best_hits, changed_queries, match_sheet
    from pipeline.eval.results import read_results
    from pipeline.registry import BENCHMARKS
    from pipeline.runtime.atomic import check_writable, write_atomic
    from pipeline.search.searcher import open_index

    evaluation = read_results(args.evaluation, "EVALUATION")
    output = args.output or posixpath.join(args.evaluation, "sheets")
    check_writable(output, "--output")
    results = {result.name: result for result in evaluation.results}
    names = args.rows or list(dict.fromkeys([*list(results)[:1], *list(results)[-1:]]))
    for name in names:
        if name not in results:
            raise SpecError.unknown_name("--row", name, results)
    rows = [results[name] for name in names]
    queries = args.queries or changed_queries(evaluation, rows, args.count)
    for query_id in queries:
        if query_id not in rows[0].values:
            raise SpecError("--queries", query_id, "the id of a judged query")
    judged = BENCHMARKS.build(BENCHMARKS.resolve(evaluation.spec["benchmark"])).load()
    searcher = open_index(evaluation.spec["index"])
    judged = judged.located([searcher.index], None)
    runs = [
        read_run(posixpath.join(args.evaluation, "runs", f"{result.name}.trec")) for result in rows
    ]
    for query_id, query in zip(queries, judged.inputs(queries), strict=True):
        hits = [
            (result, best_hits(run, query_id, args.k))
            for result, run in zip(rows, runs, strict=True)
        ]
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in query_id)
        path = posixpath.join(output, f"{name}.png")
        write_atomic(path, match_sheet(searcher, query, hits, judged.qrels[query_id]))
        print(path)


def _attention(arguments: Sequence[str]) -> None:
    """Draws which tokens of an item the appended tokens of an encoder attend to.

        maxray draw attention OUT.png scene.png --model out/agc/shapes/agc_16_seed-0/model
        maxray draw attention OUT.png abstract.txt --model encoder.yaml --tokens 0
        maxray draw attention OUT.png report.pdf#page=2 --model encoder.yaml

    MODEL is a folder of a trained model with appended tokens, or a YAML file with the fields of an
    encoder. Items are images (.png, .jpg, .webp), pages of PDF files, which an encoder without
    image input reads by their text layer, or texts. The output has a row per item and model with
    the item, the mean attention of the appended tokens in the last layer (the saliency of AGC), the
    groups of AGC with their centroids outlined, and the attention of the first appended tokens.
    """
    parser = jobs.parser(_attention.__doc__, "attention")
    parser.add_argument("out", metavar="OUT", help="output file (.png)")
    parser.add_argument("items", nargs="+", metavar="ITEM", help="image, PDF page or text file")
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        required=True,
        metavar="MODEL",
        help="folder of a trained model, or an encoder spec (.yaml); may be repeated",
    )
    parser.add_argument(
        "--tokens",
        type=_count,
        default=4,
        metavar="N",
        help="number of appended tokens to draw individually (default: 4)",
    )
    args = parser.parse(arguments)
    for path in args.items:
        check_exists(path.partition("#page=")[0], "items")
    for path in args.models:
        check_exists(path, "model", "the folder of a trained model or a YAML file")

    from pipeline.runtime.atomic import check_writable, write_atomic
    from pipeline.search.attention_maps import attention_sheet

    check_writable(args.out, "OUT", as_file=True)
    write_atomic(args.out, attention_sheet(args.models, args.items, args.tokens))
    print(args.out)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


FORMS: dict[str, jobs.Form] = {
    "maps": _maps,
    "sheets": _sheets,
    "attention": _attention,
}


if __name__ == "__main__":
    jobs.run(main)
