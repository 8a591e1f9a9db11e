"""Indexes a corpus: encodes it once and stores every representation that the spec lists.

    python -m jobs.index jobs/specs/cranfield.yaml
    python -m jobs.index jobs/specs/cranfield.yaml index=s3://bucket/cranfield encoder.layer=-2
    python -m jobs.index SPEC.yaml --limit 100 --dry-run

Run it again to go on after a stop, to add what is new and to replace what changed. It joins the
cluster that RAY_ADDRESS names, else starts a local one; so does `ray job submit -- python -m
jobs.index ...`. SIGTERM commits what is finished and gives the lease back (exit code 143).
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs
from pipeline import config


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    parser = jobs.spec_parser(__doc__)
    parser.add_argument("--limit", type=jobs.positive, help="only the first N listed items")
    parser.add_argument("--dry-run", action="store_true", help="list and estimate, write nothing")
    parser.add_argument(
        "--remove-missing",
        action="store_true",
        help="remove the rows of this collection that its source no longer lists",
    )
    parser.add_argument(
        "--retry-rejects",
        action="append",
        default=[],
        metavar="REASON",
        help="try items again that were rejected for this reason",
    )
    args = parser.parse(arguments)
    if args.remove_missing and args.limit:
        parser.error("--remove-missing cannot be combined with --limit")

    from pipeline.index import job
    from pipeline.index.checks import check
    from pipeline.index.dry_run import dry_run
    from pipeline.index.spec import IndexResources, IndexSpec

    spec = config.load(IndexSpec, args.spec, args.overrides)
    resources = IndexResources()
    if args.resources:
        resources = config.load(IndexResources, args.resources, what="resources")
    check(spec)
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
            report=jobs.say,
        )


if __name__ == "__main__":
    jobs.run(main)
