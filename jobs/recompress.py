"""Adds representations to an index from its stored full tokens, without encoding again.

    python -m jobs.recompress jobs/specs/cranfield_more.yaml
    python -m jobs.recompress SPEC.yaml index=s3://bucket/cranfield

Compressors and codecs that learn are fitted on `fit_items` of the index; fit_index=URI draws them
from another index, and fit_filter=FILTER from some items.

Run it again to go on after a stop, or to fill in rows that were indexed since.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs
from pipeline import config


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    args = jobs.spec_parser(__doc__, has_index=True).parse(arguments)

    from pipeline.index import recompress

    spec = config.load(recompress.RecompressSpec, args.spec, args.overrides)
    resources = recompress.RecompressResources()
    if args.resources:
        resources = config.load(recompress.RecompressResources, args.resources, what="resources")
    with jobs.cluster():
        recompress.run(spec, resources, job=jobs.job_id(), report=jobs.say)


if __name__ == "__main__":
    jobs.run(main)
