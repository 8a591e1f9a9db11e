"""Reproduces a table or figure of a paper and compares it with the paper's numbers.

    python -m examples.papers run
    python -m examples.papers run agc table4 --data /data
    python -m examples.papers run agc table4 --data /data --check
    python -m examples.papers run agc table4 --miniature

Without arguments, the job lists all tables and figures. With a paper and a table, it first runs one
item and one query through all steps. If anything is missing or wrong, it lists all problems with
the command that solves each, and the exit code is 2. Then it trains, indexes, recompresses and
evaluates, and prints our numbers beside those of the paper. With --check, it ends after the check,
which also estimates the costs of the steps.

Rerun the same command to resume. Finished steps are not repeated, and tables share the models and
indexes that they have in common. If a step fails, the steps that do not need it still run, and the
exit code is 1.

Training runs on Ray Train like `jobs.train`, by default with one worker.

With --miniature, the same steps run on generated data with tiny models, in seconds, and training
runs in this process. The data have the layout of the published data sets, with few rows. The
numbers of a miniature say nothing about the paper.

The folder OUTPUT/papers/PAPER/TABLE receives table.txt, table.csv, table.json and table.png, which
are written again when a row is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jobs
from pipeline import config
from pipeline.config import JobError, SpecError

#: Measures that depend on the load of the machine.
TIMES = {"queries/s", "seconds"}
#: Folder of the specs of the tables.
PAPERS = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and reproduces a table."""
    parser = jobs.parser(__doc__)
    parser.add_argument("paper", nargs="?", metavar="PAPER", help="paper, such as agc")
    parser.add_argument("table", nargs="?", metavar="TABLE", help="table or figure, such as table4")
    parser.add_argument(
        "--data", default="data", metavar="FOLDER", help="folder of the data sets (default: data)"
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder of models, indexes and tables (default: out, or out/miniature)",
    )
    parser.add_argument("--miniature", action="store_true", help="run the miniature")
    parser.add_argument(
        "--check", action="store_true", help="check the data, the models and one item in all steps"
    )
    parser.add_argument(
        "--parallel",
        type=jobs.positive,
        default=1,
        metavar="N",
        help="number of steps that run at the same time (default: 1)",
    )
    parser.add_argument("--train-resources", metavar="FILE", help="resources profile of training")
    parser.add_argument("--index-resources", metavar="FILE", help="resources profile of indexing")
    args = parser.parse(arguments)

    from examples.papers.tables import plan as planning
    from examples.papers.tables import spec as specs
    from pipeline import extras
    from pipeline.runtime.atomic import check_writable

    if args.table is None:
        for paper, tables in _tables(args.paper).items():
            for name in tables:
                print(f"{paper} {name:9} {specs.load_table(PAPERS, paper, name).title}")
        return
    table = specs.load_table(PAPERS, args.paper, args.table)
    output = config.absolute(args.output or ("out/miniature" if args.miniature else "out"))
    data = f"{output}/data" if args.miniature else config.absolute(args.data)
    folders = planning.Folders(data, output, str(PAPERS.parents[1]))
    plan = planning.plan(table, folders, args.miniature)
    data_sets, required = specs.load_data_sets(PAPERS), planning.required(table, args.miniature)
    extras.require("matplotlib")
    check_writable(output, "--output")
    if args.parallel > 1 and (timed := TIMES & {c[specs.MEASURE] for c in table.selections()}):
        rule = f"1 for a table with {min(timed)}, which steps at the same time would change"
        raise SpecError("--parallel", args.parallel, rule)

    from examples.papers.tables import check, miniature
    from examples.papers.tables.report import Report
    from examples.papers.tables.run import Settings, run
    from pipeline.index.spec import IndexResources
    from pipeline.runtime.progress import ray_is_connected
    from pipeline.train.ray import Workers, default_workers

    workers = None
    if args.train_resources:
        workers = config.load(Workers, args.train_resources, role="profile")
    resources = jobs.load_profile(IndexResources, args.index_resources)
    if args.miniature:
        miniature.generate_data(required, data_sets, Path(data))
        miniature.generate_models([step.fields for step in plan.steps], Path(output) / "miniature")
    if args.check or not args.miniature:  # a miniature is a check itself
        name = f"examples/papers/{args.paper}/{args.table}.yaml"
        checked = check.check(name, table, plan, required, data_sets, folders, jobs.say, resources)
        print(checked.text(), flush=True)
        if checked.problems:
            raise SystemExit(jobs.BAD_INPUT)
        if args.check:
            return
    folder = f"{output}/papers/{args.paper}/{args.table}"
    report = Report(table, plan, folder, args.miniature, required, data)
    is_small = args.miniature and args.parallel == 1 and workers is None
    with jobs.cluster_unless(lambda: is_small, args.index_resources, resources.object_store_bytes):
        # Miniatures train for less time than workers need to start.
        if workers is None and not is_small and ray_is_connected():
            workers = default_workers()
        settings = Settings(jobs.job_id, jobs.say, workers, resources, args.parallel)
        settings = settings._replace(full_reports=not args.miniature)
        steps = run(plan, f"{output}/papers/steps", settings, report.update)
    text, paths = report.write(steps)
    print("", text, *paths, sep="\n")
    if failed := [step.title for step in steps if step.state == "failed"]:
        names = ", ".join(failed)
        raise JobError(f"{len(failed)} of {len(steps)} steps failed: {names}; rerun to retry them")


def _tables(paper: str | None) -> dict[str, list[str]]:
    from examples.papers.tables.spec import papers

    known = papers(PAPERS)
    if paper is None:
        return known
    if paper not in known:
        raise SpecError.unknown_name("PAPER", paper, known)
    return {paper: known[paper]}


if __name__ == "__main__":
    jobs.run(main)
