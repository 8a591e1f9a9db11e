"""Estimates the cost of an index job before it runs, and recommends a compression method.

    maxray plan jobs/specs/cranfield.yaml
    maxray plan jobs/specs/cranfield.yaml --resources cluster/profiles/gpus.yaml \
--assumptions rates.yaml --out out/plan
    maxray plan SPEC.yaml --assumptions jobs/specs/plans/pages.yaml
    maxray plan --model vidore/colqwen2-v1.0    # a checkpoint, and the spec that loads it
    maxray plan recommend INDEX                 # compression method, budget and codec

`maxray plan recommend --help` describes the recommendation of a method for an existing index.

With --model, the job describes a checkpoint: its family, base and license field, its parameters,
what it needs, and the size of its vectors. MODEL is a folder or a hub name. Only the settings and
the headers of the weights of a hub model are downloaded. The output is a spec of jobs.index with
the description as comments; `encoder.revision=REVISION` and other assignments change it.

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
from pathlib import Path
from typing import Any

import jobs
from pipeline import config
from pipeline.config import SpecError
from pipeline.index import check_index
from pipeline.registry import check_fields


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and plans."""
    if jobs.run_form(FORMS, arguments):
        return
    parser = jobs.parser(__doc__)
    parser.add_argument("spec", nargs="?", help="YAML spec of jobs.index")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="assignments of the form dotted.field=value"
    )
    parser.add_argument("--model", help="hub name or folder of a checkpoint to describe")
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
    if args.model is not None:
        from pipeline.eval.planning.models import plan_model

        print(
            plan_model(args.model, [args.spec, *args.overrides][args.spec is None :]).text(), end=""
        )
        return
    if args.spec is None:
        parser.error("SPEC or --model is required")
    fields = config.override(config.read(args.spec, "spec"), args.overrides)
    check_fields(fields)

    from pipeline.eval.planning.report import stage_table, storage_table, summary, write
    from pipeline.eval.planning.run import is_complete, make_plan, stage_pools
    from pipeline.eval.planning.spec import Assumptions
    from pipeline.index.spec import IndexResources, IndexSpec
    from pipeline.runtime.atomic import check_writable

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


def _recommend(arguments: Sequence[str]) -> None:
    """Recommends a compression method, a budget and a codec for the stored vectors of an index.

        maxray plan recommend out/cranfield/index --retain 0.95 --max-bytes 4096
        maxray plan recommend INDEX --queries jobs/data/photos --max-milliseconds 50
        maxray plan recommend INDEX --queries jobs/specs/us_government_evaluate.yaml

    The job compresses a sample of the items with every combination of method, budget and codec, in
    memory, and compares the rankings with those of the uncompressed vectors. It recommends the
    smallest candidate whose retained quality is at least --retain at the lower end of its 95 %
    confidence interval, and which meets the limits on size and time. Nothing is written to the
    index.

    QUERIES is a folder in BEIR format, or a spec of jobs.evaluate, whose benchmark, query vectors,
    level and filter are used. Without it, the quality is estimated with pseudo-queries that are
    made from the vectors of the items.

    The job prints a table, the reason and the command that adds the recommended representation,
    unless the index already stores it. With --out, it also writes recommendation.json,
    candidates.csv, recommendation.png and the spec recompress.yaml.
    """
    parser = jobs.parser(_recommend.__doc__, "recommend")
    parser.add_argument("index", help="URI of the index")
    parser.add_argument("--representation", help="uncompressed representation (default: full)")
    parser.add_argument("--queries", help="BEIR folder, or spec of jobs.evaluate (.yaml)")
    parser.add_argument("--filter", help="SQL condition on the item columns")
    parser.add_argument(
        "--retain", type=float, help="fraction of the quality to retain (default: 0.95)"
    )
    parser.add_argument("--max-bytes", type=float, help="maximum vector bytes per item")
    parser.add_argument("--max-milliseconds", type=float, help="maximum scoring time per query")
    parser.add_argument(
        "--methods", nargs="+", help="compressors (default: none hpool samer spatial kcenter)"
    )
    parser.add_argument(
        "--budgets", nargs="+", type=int, help="vectors per item (default: 1 2 4 8 16 32 64)"
    )
    parser.add_argument("--codecs", nargs="+", help="codecs (default: float16 int8)")
    parser.add_argument("--sample", type=int, help="number of sampled items (default: 500)")
    parser.add_argument("--num-queries", type=int, help="maximum number of queries (default: 300)")
    parser.add_argument("--seed", type=int, help="random seed (default: 0)")
    parser.add_argument(
        "--validate",
        action="store_true",
        help="with --queries: report the regret of recommendations with half of the queries and "
        "with pseudo-queries",
    )
    parser.add_argument("--out", metavar="FOLDER", help="output folder")
    # Intermixed parsing does not support options with several values.
    args = vars(parser.parse_args(arguments))
    check_index(args["index"])
    queries, out, validate = args.pop("queries"), args.pop("out"), args.pop("validate")
    if validate and queries is None:
        parser.error("--validate requires --queries")
    fields = {name: value for name, value in args.items() if value is not None}

    from pipeline.eval.recommend.report import (
        SPEC,
        reason,
        recompress_spec,
        regret_table,
        table,
        write,
    )
    from pipeline.eval.recommend.run import recommend
    from pipeline.eval.recommend.spec import RecommendSpec
    from pipeline.runtime.atomic import check_writable

    if queries is not None:
        fields = {**_query_fields(queries), **fields}
    spec = config.parse(RecommendSpec, {**fields, "validate_estimate": validate})
    if out is not None:
        check_writable(out, "--out")
    recommendation = recommend(spec, jobs.say)
    print("", table(recommendation).text(), "", reason(recommendation), sep="\n")
    if recommendation.regrets:
        print("", regret_table(recommendation).text(), sep="\n")
    path = SPEC
    if out is not None:
        paths = write(recommendation, out)
        path = next((name for name in paths if name.endswith(SPEC)), SPEC)
        print("", *paths, sep="\n")
    if representation := recompress_spec(recommendation):
        import yaml

        print("", yaml.safe_dump(representation, sort_keys=False), sep="\n", end="")
        print(f"\nTo add it, {'' if out else f'save this spec as {SPEC} and '}run:")
        print(f"maxray add representations {path}")
    else:
        print(f"\nThe index already stores it as {recommendation.stored_as}.")


def _query_fields(queries: str) -> dict[str, Any]:
    rule = "a BEIR folder or a spec of jobs.evaluate (.yaml)"
    config.check_exists(queries, "--queries", rule)
    if Path(queries).suffix not in (".yaml", ".yml"):
        if Path(config.absolute(queries)).is_file():
            raise SpecError("--queries", queries, rule)
        return {"benchmark": {"name": "beir", "path": queries}}
    evaluation = config.read(queries, "--queries")
    if "benchmark" not in evaluation:
        raise SpecError("--queries", queries, "a spec of jobs.evaluate", "has no benchmark")
    names = ("benchmark", "query_vectors", "judged", "filter")
    return {name: evaluation[name] for name in names if name in evaluation}


FORMS: dict[str, jobs.Form] = {"recommend": _recommend}


if __name__ == "__main__":
    jobs.run(main)
