"""Reproduces a table of a paper and compares it with the paper's numbers.

    python -m examples.papers run
    python -m examples.papers run agc table4 --data /data
    python -m examples.papers run agc table4 --data /data --check
    python -m examples.papers run agc table4 --miniature

Without arguments, the job lists all tables. With a paper and a table, it checks the data and
models, trains, indexes, recompresses and evaluates, and prints our numbers beside those of the
paper. Missing files are listed with where to obtain them, and the exit code is 2.

Rerun the same command to resume. Finished steps are not repeated, and tables share the models and
indexes that they have in common.

Training runs on Ray Train like `jobs.train`, by default with one worker.

With --miniature, the same steps run on generated data with tiny models, in seconds, and training
runs in this process. The data have the layout of the published data sets, with few rows. The
numbers of a miniature say nothing about the paper.

The folder OUTPUT/papers/PAPER/TABLE receives table.txt, table.csv, table.json and table.png.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jobs
from pipeline import config

#: Folder of the specs of the tables.
PAPERS = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and reproduces a table."""
    parser = jobs.parser(__doc__)
    parser.add_argument("paper", nargs="?", metavar="PAPER", help="paper, such as agc")
    parser.add_argument("table", nargs="?", metavar="TABLE", help="table, such as table4")
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
        "--check", action="store_true", help="check the data and list the steps without running"
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
    sentences = []
    if not args.miniature:
        sentences = planning.missing(plan.steps, required, data_sets, folders)
    if args.check:
        for step in plan.steps:
            print(f"{step.name}: {step.fields.get('output') or step.fields['index']}")
    if sentences:
        raise SystemExit(jobs.report_missing(sentences))
    if args.check:
        return
    extras.require("matplotlib")
    check_writable(output, "--output")

    from examples.papers.tables import miniature, report
    from examples.papers.tables.run import run
    from pipeline.index.spec import IndexResources
    from pipeline.train.ray import Workers, default_workers

    workers = resources = None
    if args.train_resources:
        workers = config.load(Workers, args.train_resources, role="profile")
    if args.index_resources:
        resources = config.load(IndexResources, args.index_resources, role="resources")
    if args.miniature:
        miniature.generate_data(required, data_sets, Path(data))
        miniature.generate_models([step.fields for step in plan.steps], Path(output) / "miniature")
    with jobs.cluster(resources.object_store_bytes if resources else None):
        if workers is None and not args.miniature:  # miniatures train for less time than it starts
            workers = default_workers()
        run(
            plan.steps,
            job_id=jobs.job_id,
            say=jobs.say,
            workers=workers,
            resources=resources,
            full_reports=not args.miniature,
        )
    titles, rows = report.table_rows(table, plan)
    folder = f"{output}/papers/{args.paper}/{args.table}"
    text, paths = report.write(table, titles, rows, folder, args.miniature)
    print("", text, *paths, sep="\n")


def _tables(paper: str | None) -> dict[str, list[str]]:
    from examples.papers.tables.spec import papers

    known = papers(PAPERS)
    if paper is None:
        return known
    if paper not in known:
        raise config.SpecError.unknown_name("PAPER", paper, known)
    return {paper: known[paper]}


if __name__ == "__main__":
    jobs.run(main)
