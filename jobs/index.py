"""Indexes folders and files, or the corpus of a spec.

    maxray index papers/
    maxray index papers/ notes/ report.docx --index library
    maxray index s3://bucket/papers --index s3://bucket/library encoder=colpali
    maxray index papers/ --watch
    maxray index papers/ --print-spec > papers.yaml
    maxray index jobs/specs/cranfield.yaml
    maxray index jobs/specs/cranfield.yaml index=s3://bucket/cranfield encoder.layer=-2
    maxray index SPEC.yaml --limit 100 --dry-run

The types of files are detected by their content: texts, Markdown, HTML, e-mails, CSV, JSON lines,
DOCX, PPTX, XLSX, OpenDocument, EPUB, PDF, images, video and audio. A table shows what became of
each file. The index of a single folder or file is beside it, papers.maxray. The index follows the
files: rerun the command, or let --watch do so, to index new and changed files and to remove deleted
ones. Paths can be glob patterns.

Images, video and audio are found by the words in them. With --see, images and video frames are
also found by what they show, with a checkpoint of SigLIP or CLIP, in a folder or on the hub. An
index made without it is completed: its images and videos are encoded again.

    maxray index photos/ --see
    maxray index photos/ --see models/clip-vit-base-patch32

A path that ends in .yaml or .yml is a spec, which defines a source, an encoder and any number of
representations. --print-spec prints the spec of folders and files.

Rerun the same command to resume an interrupted job. A small source, of up to 256 MiB of files or
10,000 texts, is indexed in this process. For a larger one, or with --resources, the job connects to
the Ray cluster at RAY_ADDRESS or starts a local one. It can be submitted with `ray job submit --
maxray index ...`. On SIGTERM it commits finished work, releases the lease and exits with code 143.

On a terminal, the job shows a live display of its progress. `maxray status INDEX --watch`
shows the same on another terminal or machine.
"""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import jobs
from pipeline import config
from pipeline.index import SEE_MODEL
from pipeline.runtime.progress import Display, open_display

if TYPE_CHECKING:
    from pipeline.index.spec import IndexResources, IndexSpec

#: Interval in which --watch looks for changes, in seconds.
WATCH_SECONDS = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the job."""
    parser = jobs.spec_parser(__doc__, accepts_files=True)
    parser.add_argument("--index", help="URI of the index of the folders and files")
    parser.add_argument(
        "--see",
        nargs="?",
        const=SEE_MODEL,
        metavar="MODEL",
        help=f"find images and frames by what they show (default of MODEL: {SEE_MODEL})",
    )
    parser.add_argument("--watch", action="store_true", help="index files whenever they change")
    parser.add_argument(
        "--print-spec", action="store_true", help="print the spec of the job in place of running it"
    )
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
    if jobs.is_spec(args.spec) and (args.watch or args.index or args.see is not None):
        rule = "require folders or files; a spec has the fields `index` and `see`"
        parser.error(f"--watch, --index and --see {rule}")
    with open_display("plain" if args.dry_run else args.progress) as display:
        if not args.print_spec:
            display.phase("load modules")
        _run(args, display)


def _run(args: argparse.Namespace, display: Display) -> None:
    from pipeline.eval.planning.trial import dry_run
    from pipeline.index import job, listing
    from pipeline.index.checks import check
    from pipeline.index.spec import IndexResources, IndexSpec

    fields = _fields(args)
    if args.print_spec:
        print(yaml.safe_dump(_plain(fields), sort_keys=False, allow_unicode=True), end="")
        return
    spec = config.parse(IndexSpec, fields)
    resources = jobs.load_profile(IndexResources, args.resources)
    check(spec)
    source = spec.build_source()
    options = {
        "limit": args.limit,
        "retry_rejects": tuple(args.retry_rejects),
        "report": display.say,
    }
    with jobs.cluster_unless(
        lambda: listing.is_small(source),
        args.resources,
        resources.object_store_bytes,
        display,
    ):
        if args.dry_run:
            dry_run(spec, resources, args.limit, print)
        elif jobs.is_spec(args.spec):
            remove = args.remove_missing
            job.run(spec, resources, job=jobs.job_id(), remove_missing=remove, **options)
        else:
            _index_files(spec, resources, args.watch, options, display)


def _index_files(
    spec: IndexSpec,
    resources: IndexResources,
    is_watching: bool,
    options: dict[str, Any],
    display: Display,
) -> None:
    """Indexes files once, or whenever they change."""
    from pipeline.index.folder import folders, index_files
    from pipeline.index.in_process import current

    def report(line: str) -> None:
        if not line.startswith("rejected "):  # the table has the rejected files
            display.say(line)

    executor, sources = current(), folders(spec.build_source())  # keeps the encoder loaded
    seen: list[Any] | None = None
    while True:
        states = [source.file_states() for source in sources if is_watching]
        if states != seen:
            try:
                options |= {"job_id": jobs.job_id(), "executor": executor, "report": report}
                account = index_files(spec, resources, **options)
                name = shlex.quote(spec.index)
                steps = f'next: maxray search {name} "a question", or maxray serve {name}'
                display.say(f"files by type\n{account}\nindex: {spec.index}\n{steps}")
            except config.SpecError as error:  # such as an empty folder
                if seen is None:
                    raise
                display.say(f"error: {error}")
        if not is_watching:
            return
        seen = states
        time.sleep(WATCH_SECONDS)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the spec, or those of the spec for folders and files."""
    if jobs.is_spec(args.spec):
        return config.override(config.read(args.spec, "spec"), args.overrides)
    from pipeline.index.folder import folder_spec

    overrides = [text for text in args.overrides if _is_override(text)]
    paths = [args.spec, *(text for text in args.overrides if text not in overrides)]
    return config.override(folder_spec(paths, args.index, see=args.see), overrides)


def _is_override(text: str) -> bool:
    return bool(re.match(r"[a-z_]+(\.[^/=]+)*=", text)) and not Path(text).exists()


def _plain(value: Any) -> Any:
    """Replaces assigned texts by their values."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.parsed() if isinstance(value, config.Assigned) else value


if __name__ == "__main__":
    jobs.run(main)
