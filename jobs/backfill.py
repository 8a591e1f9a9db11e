"""Adds the adapter tokens of an EDJE to an index, for reranking.

    maxray backfill SPEC.yaml rerank=FOLDER
    maxray backfill my.yaml rerank=out/training/edje/model

SPEC.yaml is the spec with which the index was created. The items are read and encoded again. Rerun
the same command to resume an interrupted job, or to fill rows that were indexed since without
`rerank`. For an index of several sources, run it with the spec of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jobs
from pipeline import config
from pipeline.progress import Display, open_display


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    parser = jobs.spec_parser(__doc__, has_index=True)
    jobs.add_progress(parser)
    args = parser.parse(arguments)
    with open_display(args.progress) as display:
        display.phase("load modules")
        _run(args, display)


def _run(args: argparse.Namespace, display: Display) -> None:
    from pipeline.index import backfill
    from pipeline.index.spec import IndexResources, IndexSpec

    spec = config.load(IndexSpec, args.spec, args.overrides)
    resources = IndexResources()
    if args.resources:
        resources = config.load(IndexResources, args.resources, role="resources")
    display.phase("start Ray")
    with jobs.cluster(resources.object_store_bytes):
        backfill.run(spec, resources, job_id=jobs.job_id(), report=display.say)


if __name__ == "__main__":
    jobs.run(main)
