"""Builds a candidate generator, which makes searches faster than scoring all items.

    maxray candidates out/cranfield/index lemur
    maxray candidates INDEX lemur representation=hpool_32 generator.features=mlp
    maxray candidates INDEX lemur queries=log.jsonl --refit
    maxray candidates INDEX lemur representation=hpool_32 --drop
    maxray candidates INDEX

The generator is fitted to a sample of the items, and the code of each item is stored in a column of
the index. Searches use it with --candidates (jobs.search) or `candidates` (jobs.evaluate, HTTP).

Rerun the same command to resume an interrupted job, or to code rows that were indexed since; until
then, these rows are scored exactly. --refit fits the generator again and replaces the former one
when all items have new codes. Without GENERATOR, the command lists the generators of the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import check_index
from pipeline.progress import open_display

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.search.query import AnyQuery


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    parser = jobs.parser(__doc__)
    parser.add_argument("index", help="URI of the index")
    parser.add_argument("generator", nargs="?", help="name of the generator")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="assignments of the form dotted.field=value"
    )
    parser.add_argument("--refit", action="store_true", help="fit the generator again")
    parser.add_argument("--drop", action="store_true", help="remove the generator")
    parser.add_argument("--resources", help="resources profile; see cluster/profiles")
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    if args.refit and args.drop:
        parser.error("--refit cannot be combined with --drop")
    check_index(args.index)
    if args.generator is None:
        if args.refit or args.drop:
            parser.error("--refit and --drop require GENERATOR")
        _print_generators(args.index)
        return
    if "=" in args.generator:
        raise SpecError("GENERATOR", args.generator, "the name of a generator before assignments")

    from pipeline.eval.topics import read_queries, read_query_vectors
    from pipeline.search import candidates_job

    fields = {"index": args.index, "generator": {"name": args.generator}}
    spec = config.parse(candidates_job.CandidatesJobSpec, config.override(fields, args.overrides))
    resources = candidates_job.CandidatesResources()
    if args.resources:
        resources = config.load(
            candidates_job.CandidatesResources, args.resources, role="resources"
        )
    if args.drop:
        candidates_job.drop(spec, job=jobs.job_id(), report=jobs.say)
        return
    candidates_job.check(spec, refit=args.refit)
    queries: list[AnyQuery] = []
    if spec.queries is not None:
        is_vectors = spec.queries.endswith((".npy", ".parquet"))
        read = read_query_vectors if is_vectors else read_queries
        queries = list(read(spec.queries).values())
    with open_display(args.progress) as display:
        display.phase("start Ray")
        with jobs.cluster():
            candidates_job.run(
                spec,
                resources,
                job=jobs.job_id(),
                queries=queries,
                refit=args.refit,
                report=display.say,
            )


def _print_generators(uri: str) -> None:
    """Prints the generators of an index and how many of its items have codes."""
    from pipeline.index.reader import Index
    from pipeline.index.status import candidates_stats
    from pipeline.report.text import Table

    rows = Table([["representation", "generator", "revision", "items with codes", "items"]])
    for stats in candidates_stats(Index(uri)):
        numbers = [str(stats["revision"]), f"{stats['coded']:,}", f"{stats['items']:,}"]
        rows.append([stats["representation"], stats["generator"], *numbers])
    print(rows.text() if len(rows) > 1 else "the index has no candidate generators")


if __name__ == "__main__":
    jobs.run(main)
