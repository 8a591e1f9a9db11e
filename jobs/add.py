"""Adds columns to an index: representations, tokens for reranking, codes of candidates.

    maxray add representations SPEC.yaml
    maxray add tokens SPEC.yaml rerank=FOLDER
    maxray add candidates INDEX GENERATOR

`maxray add COLUMNS --help` describes the columns and the arguments. Rerun the same command to
resume an interrupted job, or to fill rows that were indexed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import check_index
from pipeline.runtime.progress import Display, open_display

if TYPE_CHECKING:  # imported lazily to keep --help fast
    from pipeline.index.add import AddedColumns
    from pipeline.search.query import AnyQuery


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    if jobs.run_form(FORMS, arguments):
        return
    parser = jobs.parser(__doc__)
    parser.add_argument("columns", choices=FORMS, help="columns to add")
    parser.parse(arguments)


def _representations(arguments: Sequence[str]) -> None:
    """Adds representations that are computed from stored uncompressed token vectors.

        maxray add representations jobs/specs/cranfield_more.yaml
        maxray add representations SPEC.yaml index=s3://bucket/cranfield

    The items are not encoded again. Compressors and codecs that need it are fitted on a sample of
    `fit_items` items. fit_index=URI draws the sample from another index, fit_filter=SQL from the
    items that satisfy a condition.
    """
    parser = jobs.spec_parser(_representations.__doc__, "representations", has_index=True)
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    with open_display(args.progress) as display:
        display.phase("load modules")
        from pipeline.index.recompress import Recompression, RecompressResources, RecompressSpec

        spec = config.load(RecompressSpec, args.spec, args.overrides)
        resources = jobs.load_profile(RecompressResources, args.resources)
        _run(Recompression(spec, resources), display, args.resources)


def _tokens(arguments: Sequence[str]) -> None:
    """Adds the adapter tokens of an EDJE to an index, for reranking.

        maxray add tokens SPEC.yaml rerank=FOLDER
        maxray add tokens my.yaml rerank=out/training/edje/model

    SPEC.yaml is the spec with which the index was created. The items are read and encoded again.
    Rows that were indexed since without `rerank` are filled as well. For an index of several
    sources, run it with the spec of each.
    """
    parser = jobs.spec_parser(_tokens.__doc__, "tokens", has_index=True)
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    with open_display(args.progress) as display:
        display.phase("load modules")
        from pipeline.index.backfill import Backfill
        from pipeline.index.spec import IndexResources, IndexSpec

        spec = config.load(IndexSpec, args.spec, args.overrides)
        resources = jobs.load_profile(IndexResources, args.resources)
        columns = Backfill(spec, resources)
        _run(columns, display, args.resources, resources.object_store_bytes)


def _candidates(arguments: Sequence[str]) -> None:
    """Builds a candidate generator, which makes searches faster than scoring all items.

        maxray add candidates out/cranfield/index ivf
        maxray add candidates INDEX ivf representation=hpool_32 recall=0.99
        maxray add candidates INDEX ivf queries=log.jsonl --refit
        maxray add candidates INDEX ivf representation=hpool_32 --drop

    The generator is fitted to a sample of the items, and the code of each item is stored in a
    column of the index. Searches use it with --candidates (jobs.search) or `candidates`
    (jobs.evaluate, HTTP).

    Rows without codes are scored exactly. --refit fits the generator again and replaces the former
    one when all items have new codes. `maxray status INDEX` lists the generators of the index.
    """
    parser = jobs.parser(_candidates.__doc__, "candidates")
    parser.add_argument("index", help="URI of the index")
    parser.add_argument("generator", help="name of the generator")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="assignments of the form dotted.field=value"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--refit", action="store_true", help="fit the generator again")
    group.add_argument("--drop", action="store_true", help="remove the generator")
    parser.add_argument("--resources", help="resources profile; see cluster/profiles")
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    check_index(args.index)
    if "=" in args.generator:
        raise SpecError("GENERATOR", args.generator, "the name of a generator before assignments")

    from pipeline.eval.topics import read_queries, read_query_vectors
    from pipeline.search import candidates_job

    fields = {"index": args.index, "generator": {"name": args.generator}}
    spec = config.parse(candidates_job.CandidatesJobSpec, config.override(fields, args.overrides))
    resources = jobs.load_profile(candidates_job.CandidatesResources, args.resources)
    if args.drop:
        candidates_job.drop(spec, job=jobs.job_id(), report=jobs.say)
        return
    queries: list[AnyQuery] = []
    if spec.queries is not None:
        is_vectors = spec.queries.endswith((".npy", ".parquet"))
        read = read_query_vectors if is_vectors else read_queries
        queries = list(read(spec.queries).values())
    columns = candidates_job.Candidates(spec, resources, queries, refit=args.refit)
    with open_display(args.progress) as display:
        _run(columns, display, args.resources)


def _run(
    columns: AddedColumns,
    display: Display,
    resources: str | None,
    object_store_bytes: int | None = None,
) -> None:
    from pipeline.index import add

    with jobs.cluster_unless(lambda: columns.is_small, resources, object_store_bytes, display):
        add.run(columns, job=jobs.job_id(), report=display.say)


#: Forms by the columns that they add.
FORMS: dict[str, jobs.Form] = {
    "representations": _representations,
    "tokens": _tokens,
    "candidates": _candidates,
}


if __name__ == "__main__":
    jobs.run(main)
