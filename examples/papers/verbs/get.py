"""Downloads the data sets and checkpoints that tables need.

    python -m examples.papers get
    python -m examples.papers get agc table4 --data /data
    python -m examples.papers get agc sap --data /data
    python -m examples.papers get flickr30k coco --data /data
    python -m examples.papers get Qwen/Qwen3-VL-Embedding-2B
    python -m examples.papers get smart --data /data --dry-run

A name is a paper, which a table may follow, a data set of examples/papers/data.yaml, or a model on
the Hugging Face Hub. Without names, all data sets and checkpoints are listed.

Sizes are printed first, and nothing is downloaded if the disk is too small. Files are verified,
archives unpacked, and data sets converted to the form that tables read. Checkpoints are stored in
the cache of the hub; pickled weights are converted to safetensors below DATA/models. Rerun the same
command to resume.

Commits are those that data.yaml and models.yaml pin. DATA/revisions.json records all commits and
hashes, and later downloads obtain the same ones. Data sets that cannot be downloaded without a
request are listed with what to do, and the exit code is 2.

With --dry-run, the names, sizes and origins are listed without network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jobs
from examples.papers.downloads.revisions import Revisions
from examples.papers.downloads.spec import DataSet, Download, Pin, is_hub_name, load_checkpoints
from examples.papers.tables import plan as planning
from examples.papers.tables import spec as specs
from examples.papers.verbs.run import PAPERS
from pipeline import config
from pipeline.config import SpecError
from pipeline.runtime.atomic import check_writable

#: Mark of sources whose commit was not known when data.yaml and models.yaml were written.
NOT_PINNED = "not pinned"


class Selection(NamedTuple):
    """Data sets and checkpoints by name."""

    data_sets: dict[str, DataSet]
    models: dict[str, Pin]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and downloads."""
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="paper, and optionally a table; data set; or model"
    )
    parser.add_argument(
        "--data", default="data", metavar="FOLDER", help="folder of the data sets (default: data)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the downloads without network")
    args = parser.parse(arguments)

    data = config.absolute(args.data)
    selection, revisions = select(args.names, data), Revisions(data)
    for line in describe(selection, revisions):
        print(line)
    if args.dry_run or not args.names:
        return
    check_writable(data, "--data")
    sentences = get(selection, revisions)
    if sentences:
        raise SystemExit(jobs.report_missing(sentences))


def select(names: Sequence[str], data: str) -> Selection:
    """Returns what the names on the command line select."""
    tables, known = specs.papers(PAPERS), specs.load_data_sets(PAPERS)
    folders = planning.Folders(data, "out", str(PAPERS.parents[1]))
    checkpoints = load_checkpoints(PAPERS)
    selected = Selection({}, {})
    queue = list(names) or [*tables, *known, *checkpoints]
    while queue:
        name = queue.pop(0)
        if name in tables:
            is_table = queue and (queue[0] in tables[name] or queue[0].startswith("table"))
            for table in [queue.pop(0)] if is_table else tables[name]:
                spec = specs.load_table(PAPERS, name, table)
                required = planning.required(spec, miniature=False)
                selected.data_sets.update((part, known[part]) for part in required)
                for model in planning.models(planning.plan(spec, folders, False).steps):
                    if is_hub_name(model):
                        selected.models[model] = checkpoints.get(model, Pin())
        elif name in known:
            selected.data_sets[name] = known[name]
        elif is_hub_name(name):
            selected.models[name] = checkpoints.get(name, Pin())
        else:
            raise SpecError.unknown_name("NAME", name, [*tables, *known, *checkpoints])
    return selected


def describe(selection: Selection, revisions: Revisions) -> Iterator[str]:
    """Yields a line with size and origin per data set and checkpoint, and the total."""
    rows: list[tuple[str, str, str]] = []
    total = 0.0
    for name, data_set in selection.data_sets.items():
        is_present, title = revisions.is_complete(name, data_set), name
        for download in data_set.downloads:
            size = "present" if is_present else _gigabytes([download.gigabytes])
            rows.append((title, size, _origin(download, revisions.of_download(name, download))))
            total += 0.0 if is_present else download.gigabytes or 0.0
            title = ""
        rows += [(title, "", data_set.note)] if data_set.note else []
    for name, pin in selection.models.items():
        commit = revisions.of_model(name, pin)
        is_present = revisions.has_model(name, pin)
        size = "present" if is_present else _gigabytes([pin.gigabytes])
        rows.append((name, size, f"hub, {commit[:7] if commit else NOT_PINNED}"))
        total += 0.0 if is_present else pin.gigabytes or 0.0
    width = max((len(name) for name, _, _ in rows), default=0)
    yield from (f"{name:{width}}  {size:>10}  {origin}".rstrip() for name, size, origin in rows)
    yield f"{'to download':{width}}  {_gigabytes([total]):>10}"


def _gigabytes(sizes: Sequence[float | None]) -> str:
    """Formats a sum of sizes.

    >>> _gigabytes([1.25, 2]), _gigabytes([1.25, None]), _gigabytes([None]), _gigabytes([0.001])
    ('3.25 GB', '> 1.25 GB', 'unknown', '0.001 GB')
    >>> _gigabytes([1e-6]), _gigabytes([])
    ('< 0.001 GB', '0 GB')
    """
    known = [size for size in sizes if size is not None]
    if sizes and not known:
        return "unknown"
    if 0 < sum(known) < 0.001:
        return "< 0.001 GB"
    return f"{'> ' if len(known) < len(sizes) else ''}{float(f'{sum(known):.3g}'):g} GB"


def _origin(download: Download, revision: str | None) -> str:
    if download.hub is None:
        return download.source
    return f"{download.hub}, {revision[:7] if revision else NOT_PINNED}"


def get(selection: Selection, revisions: Revisions) -> list[str]:
    """Downloads what is missing and returns one sentence per problem."""
    from examples.papers.downloads import obtain

    tasks, problems = obtain.plan(selection.data_sets, selection.models, revisions)
    sizes = [None if (n := task.num_bytes) is None else n / 1e9 for task in tasks]
    for task, size in zip(tasks, sizes, strict=True):
        print(f"{task.name}: {_gigabytes([size])} from {task.source}")
    print(f"total: {_gigabytes(sizes)}", flush=True)
    obtain.check_space(tasks, revisions.folder)
    for task in tasks:
        try:
            obtain.obtain(task, revisions, jobs.say)
        except SpecError as error:
            problems.append(f"{task.name}: {error}.")
    failed = {problem.partition(":")[0] for problem in problems}
    for name, data_set in selection.data_sets.items():
        if name not in failed:
            problems += obtain.verify(name, data_set, revisions.folder)
    return problems


if __name__ == "__main__":
    jobs.run(main)
