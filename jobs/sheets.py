"""Draws the best hits of judged queries, with the relevant ones outlined.

    maxray sheets out/shapes/evaluation
    maxray sheets EVALUATION --row single_vector --row full.hybrid --count 5 --k 5
    maxray sheets EVALUATION --row full.maxsim --queries q1 q7 --output out/sheets

EVALUATION is the output folder of `jobs.evaluate`. For each query, the folder `sheets` in it, or
--output, receives a PNG with a row of hits per --row (default: the first and the last row of the
table). Relevant hits are outlined in green, and in MaxSim and hybrid rows the matches are
highlighted.

Without --queries, the queries are those that gain most from the first to the last row in the main
metric.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

import jobs
from pipeline.config import SpecError


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the sheets."""
    parser = jobs.parser(__doc__)
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

    from pipeline.atomic import check_writable, write_atomic
    from pipeline.eval.metrics import read_run
    from pipeline.eval.results import read_results
    from pipeline.registry import BENCHMARKS
    from pipeline.report.match_sheets import best_hits, changed_queries, match_sheet
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
    runs = [
        read_run(posixpath.join(args.evaluation, "runs", f"{result.name}.trec")) for result in rows
    ]
    searcher = open_index(evaluation.spec["index"])
    for query_id, query in zip(queries, judged.inputs(queries), strict=True):
        hits = [
            (result, best_hits(run, query_id, args.k))
            for result, run in zip(rows, runs, strict=True)
        ]
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in query_id)
        path = posixpath.join(output, f"{name}.png")
        write_atomic(path, match_sheet(searcher, query, hits, judged.qrels[query_id]))
        print(path)


if __name__ == "__main__":
    jobs.run(main)
