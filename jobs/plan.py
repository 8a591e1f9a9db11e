"""Estimates the time, storage and cost of an index job before it runs.

    maxray plan jobs/specs/cranfield.yaml
    maxray plan jobs/specs/cranfield.yaml --resources cluster/profiles/gpus.yaml \
--assumptions rates.yaml --out out/plan
    maxray plan SPEC.yaml --assumptions jobs/specs/plans/pages.yaml

SPEC and the resources profile are those of jobs.index. The job lists the source, reads, encodes,
compresses and writes a random sample of its items, and computes what the whole corpus needs.
Nothing is written to the index. The assumptions are a YAML file with what is known: the number of
items, the rates of one actor on other machines, and prices. If they contain the number of items,
the tokens per item and all rates, nothing is measured, and the corpus need not exist.

The job prints the rate of each stage, the stage that limits the job, the time, the CPU-hours and
GPU-hours, the network traffic, the storage of each column, and the price. With --out, it also
writes plan.json, stages.csv, storage.csv and plan.png.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jobs
from pipeline import config
from pipeline.registry import check_fields


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and plans."""
    parser = jobs.parser(__doc__)
    parser.add_argument("spec", help="YAML spec of jobs.index")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="assignments of the form dotted.field=value"
    )
    parser.add_argument("--resources", help="resources profile; see cluster/profiles")
    parser.add_argument("--assumptions", metavar="FILE", help="YAML file with what is known")
    parser.add_argument("--limit", type=jobs.positive, help="maximum number of items to list")
    parser.add_argument(
        "--sample", type=jobs.positive, default=64, help="items to process (default: 64)"
    )
    parser.add_argument(
        "--seconds",
        type=jobs.positive,
        default=60,
        help="time after which no further unit is processed (default: 60)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="output folder")
    args = parser.parse(arguments)
    fields = config.override(config.read(args.spec, "spec"), args.overrides)
    check_fields(fields)

    from pipeline.atomic import check_writable
    from pipeline.index.spec import IndexResources, IndexSpec
    from pipeline.planning.report import stage_table, storage_table, summary, write
    from pipeline.planning.run import is_complete, make_plan, stage_pools
    from pipeline.planning.spec import Assumptions

    spec = config.parse(IndexSpec, fields)
    resources, assumptions = jobs.load_profile(IndexResources, args.resources), Assumptions()
    if args.assumptions:
        assumptions = config.load(Assumptions, args.assumptions, role="assumptions")
    if args.out is not None:
        check_writable(args.out, "--out")
    needs_corpus = not is_complete(assumptions, stage_pools(spec, resources))
    if needs_corpus:
        jobs.check_paths(fields)
    with jobs.cluster(resources.object_store_bytes) if needs_corpus else contextlib.nullcontext():
        plan = make_plan(
            spec,
            resources,
            assumptions,
            limit=args.limit,
            sample_size=args.sample,
            max_seconds=args.seconds,
            report=jobs.say,
        )
    print("", stage_table(plan).text(), "", storage_table(plan).text(), "", sep="\n")
    print(*summary(plan), sep="\n")
    if args.out is not None:
        print("", *write(plan, args.out), sep="\n")


if __name__ == "__main__":
    jobs.run(main)
