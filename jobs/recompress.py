"""Adds representations to an index from its uncompressed token vectors, without encoding again.

    maxray recompress jobs/specs/cranfield_more.yaml
    maxray recompress SPEC.yaml index=s3://bucket/cranfield

Compressors and codecs that need it are fitted on a sample of `fit_items` items. fit_index=URI draws
the sample from another index, fit_filter=SQL from the items that satisfy a condition.

Rerun the same command to resume an interrupted job, or to fill rows that were indexed since.
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
    from pipeline.index import recompress

    spec = config.load(recompress.RecompressSpec, args.spec, args.overrides)
    resources = recompress.RecompressResources()
    if args.resources:
        resources = config.load(recompress.RecompressResources, args.resources, role="resources")
    display.phase("start Ray")
    with jobs.cluster():
        recompress.run(spec, resources, job=jobs.job_id(), report=display.say)


if __name__ == "__main__":
    jobs.run(main)
