"""Indexes a corpus: encodes it once and stores all representations of the spec.

    maxray index jobs/specs/cranfield.yaml
    maxray index jobs/specs/cranfield.yaml index=s3://bucket/cranfield encoder.layer=-2
    maxray index SPEC.yaml --limit 100 --dry-run

Rerun the same command to resume an interrupted job, or to index new and changed items. The job
connects to the cluster at RAY_ADDRESS or starts a local one, and can be submitted with `ray job
submit -- maxray index ...`. On SIGTERM it commits finished work, releases the lease and
exits with code 143.

On a terminal, the job shows a live display of its progress. `maxray status INDEX --watch`
shows the same on another terminal or machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jobs
from pipeline import config
from pipeline.runtime.progress import Display, open_display


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    parser = jobs.spec_parser(__doc__)
    parser.add_argument(
        "--limit", type=jobs.positive, help="maximum number of items, in listing order"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the source and estimate time and size without writing",
    )
    parser.add_argument(
        "--remove-missing",
        action="store_true",
        help="remove rows that the source no longer lists, also of sources removed from the spec",
    )
    parser.add_argument(
        "--retry-rejects",
        action="append",
        default=[],
        metavar="REASON",
        help="retry items that were rejected for this reason (can be repeated)",
    )
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    if args.remove_missing and args.limit:
        parser.error("--remove-missing cannot be combined with --limit")
    with open_display("plain" if args.dry_run else args.progress) as display:
        display.phase("load modules")
        _run(args, display)


def _run(args: argparse.Namespace, display: Display) -> None:
    from pipeline.eval.planning.trial import dry_run
    from pipeline.index import job
    from pipeline.index.checks import check
    from pipeline.index.spec import IndexResources, IndexSpec

    spec = config.load(IndexSpec, args.spec, args.overrides)
    resources = jobs.load_profile(IndexResources, args.resources)
    check(spec)
    display.phase("start Ray")
    with jobs.cluster(resources.object_store_bytes):
        if args.dry_run:
            dry_run(spec, resources, args.limit, print)
            return
        job.run(
            spec,
            resources,
            job=jobs.job_id(),
            limit=args.limit,
            remove_missing=args.remove_missing,
            retry_rejects=tuple(args.retry_rejects),
            report=display.say,
        )


if __name__ == "__main__":
    jobs.run(main)
