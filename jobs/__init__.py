"""Command line jobs, run with `python -m jobs.VERB`.

The docstring of each module is its `--help` text and begins with the exact commands.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import inspect
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from jobs._errors import BAD_INPUT, report_error, report_stop
from jobs._errors import report_missing as report_missing
from jobs._ray_cluster import cluster as cluster
from jobs._ray_cluster import cluster_unless as cluster_unless
from jobs._ray_cluster import configure_ray
from pipeline import config
from pipeline.config import JobError, SpecError, Stopped
from pipeline.extras import MissingExtra, as_missing_extra
from pipeline.index import check_index
from pipeline.index import job_id as job_id
from pipeline.paths import is_uri
from pipeline.registry import check_fields
from pipeline.runtime import logs
from pipeline.runtime.progress import MODES
from pipeline.runtime.progress import say as say

#: Parses the command line of one form of a verb, such as `add candidates`, and runs it. Its
#: docstring is the help text.
Form = Callable[[Sequence[str]], None]


def run(
    main: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None
) -> None:
    """Runs the main function of a job and converts expected errors to exit codes.

    For invalid input, the error is printed as one sentence and the exit code is 2. Other expected
    failures have exit code 1.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # progress bars clutter logs
    configure_ray()
    prepare_output()
    try:
        logs.configure()
        with _sigterm_as_stopped():
            main(arguments)
        sys.stdout.flush()
    except (SpecError, MissingExtra) as error:
        sys.exit(report_error(error, BAD_INPUT))
    except ModuleNotFoundError as error:
        if (missing := as_missing_extra(error)) is error:
            raise
        sys.exit(report_error(missing, BAD_INPUT))
    except (Stopped, KeyboardInterrupt) as stopped:
        sys.exit(report_stop(stopped))
    except JobError as error:
        sys.exit(report_error(error, 1))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if hasattr(error, "cause"):  # raised in a Ray task: its traceback matters
            raise
        sys.exit(report_error(error, 1))


def run_form(forms: Mapping[str, Form], arguments: Sequence[str] | None) -> bool:
    """Runs the form of a verb that the first argument names; returns False if it names none."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if form := forms.get(name):
        form(arguments[1:])
        return True
    if config.close_match(name, forms) and not (name.startswith("-") or Path(name).exists()):
        raise SpecError.unknown_name("form", name, forms, "does not exist")
    return False


def prepare_output() -> None:
    """Makes printing safe in any encoding, and if the standard output or error is closed.

    Characters that the encoding lacks are printed as escapes.
    """
    for fd, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(fd)
        except OSError:  # otherwise the next file that is opened would become the output
            null = os.open(os.devnull, os.O_WRONLY)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _sigterm_as_stopped() -> Iterator[None]:
    """Raises `Stopped` on SIGTERM, also while modules load and Ray starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Parser(argparse.ArgumentParser):
    """Argument parser that accepts options at any position and exits with code 2 on errors."""

    def __init__(self, doc: str | None, form: str | None = None):
        script = Path(sys.argv[0])
        is_verb = script.parent == Path(__file__).parent
        prog = f"maxray {script.stem}" if is_verb else script.name
        super().__init__(
            prog=f"{prog} {form}" if form else prog,
            description=inspect.cleandoc(doc or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses command line arguments, which default to those of this process."""
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Prints the error together with the most similar valid name and exits with code 2."""
        self.exit(BAD_INPUT, f"error: {message}{self._close_match(message)}; see --help\n")

    def _close_match(self, message: str) -> str:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            return config.close_match(choice[1], re.findall(r"'([^']*)'", choice[2]))
        if option := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            return config.close_match(option[1], self._option_string_actions)
        return ""


def parser(doc: str | None, form: str | None = None) -> Parser:
    """Creates a parser whose help text is the docstring of the job's module or of a form."""
    return Parser(doc, form)


class SpecParser(Parser):
    """Argument parser that also checks the paths and the fields of components in a spec.

    Validating a complete spec imports its components, which takes seconds. Checking the paths and
    the names of fields first reports the most common mistakes without this delay.
    """

    has_index = False  # True if the index of the spec must exist
    accepts_files = False  # True if paths of files to index can be given in place of a spec

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses the arguments and checks the paths and the fields of components in the spec."""
        args = super().parse(arguments)
        if self.accepts_files and not is_spec(args.spec):
            return args
        spec = _guessed(config.override(config.read(args.spec, "spec"), args.overrides))
        if vars(args).get("resources"):
            config.read(args.resources, "resources")
        check_paths(spec)
        check_fields(spec)
        if self.has_index and isinstance(index := spec.get("index"), str):
            if is_spec(index):  # of a federation
                config.check_exists(index, "index")
            else:
                check_index(index)
        return args


def is_spec(path: str) -> bool:
    """Checks whether a path is that of a spec: it ends in .yaml or .yml, or is a pipe."""
    is_special = Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir()
    return path.lower().endswith((".yaml", ".yml")) or is_special


def _guessed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Parses assigned values of fields, whose types are not loaded, if they are no text."""
    guessed = dict(spec)
    for field, value in spec.items():
        with contextlib.suppress(SpecError):
            if isinstance(value, config.Assigned) and not isinstance(value.parsed(), str):
                guessed[field] = value.parsed()
    return guessed


def check_paths(spec: Mapping[str, Any]) -> None:
    """Raises `SpecError` if a spec refers to a file, a folder or an index that does not exist."""
    for field in ("source", "data", "benchmark"):
        value = spec.get(field)
        components = {field: value}
        if isinstance(value, list):
            components = {f"{field}[{number}]": item for number, item in enumerate(value)}
        for name, component in components.items():
            path = component.get("path") if isinstance(component, Mapping) else None
            is_glob = field == "data" and isinstance(path, str) and glob.has_magic(path)
            if isinstance(path, str) and path and not is_glob:
                config.check_exists(path, f"{name}.path", "an existing file or folder")
    _check_collections(spec.get("source"))
    if isinstance(folder := spec.get("rerank"), str):
        config.check_exists(folder, "rerank", "the folder of a trained EDJE")
    if isinstance(index := spec.get("fit_index"), str):
        try:
            check_index(index)
        except SpecError as error:
            raise error.at("fit_index") from None


def _check_collections(sources: Any) -> None:
    first: dict[str, int] = {}
    for number, source in enumerate(sources if isinstance(sources, list) else ()):
        if not isinstance(source, Mapping) or not isinstance(path := source.get("path"), str):
            continue
        name = source.get("collection") or PurePosixPath(config.absolute(path)).name
        if first.setdefault(name, number) != number:
            field, rule = f"source[{number}].collection", "unique for each source"
            note = f", first in source[{first[name]}]; set `collection` of one of them"
            raise SpecError(field, name, rule, "occurs twice", note)


def check_outputs(outputs: Sequence[str], field: str) -> None:
    """Raises `SpecError` if a folder does not contain results of `jobs.evaluate`."""
    for output in outputs:
        if not is_uri(output) and not Path(config.absolute(output), "results.json").exists():
            rule = "the output folder of jobs.evaluate"
            raise SpecError(field, output, rule, "contains no results.json")


def spec_parser(
    doc: str | None,
    form: str | None = None,
    *,
    profiles: bool = True,
    has_index: bool = False,
    accepts_files: bool = False,
) -> Parser:
    """Creates a parser with the arguments that all jobs with a spec have in common."""
    parser = SpecParser(doc, form)
    parser.has_index, parser.accepts_files = has_index, accepts_files
    spec, overrides = "YAML spec; see jobs/specs", "assignments of the form dotted.field=value"
    if accepts_files:
        spec, overrides = "folder, file, glob pattern or YAML spec", f"more paths, or {overrides}"
    parser.add_argument("spec", metavar="PATH" if accepts_files else None, help=spec)
    parser.add_argument("overrides", nargs="*", default=[], help=overrides)
    if profiles:
        parser.add_argument("--resources", help="resources profile; see cluster/profiles")
    return parser


def load_profile(profile_class: type[config.SpecT], path: str | None) -> config.SpecT:
    """Loads the resources profile of a job, or returns the default."""
    return config.load(profile_class, path, role="resources") if path else profile_class()


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--progress`, whose value is passed to `open_display`."""
    parser.add_argument(
        "--progress",
        choices=MODES,
        default="auto",
        help="a live display, plain lines or JSON lines (default: live on a terminal, else plain)",
    )


def positive(text: str) -> int:
    """Parses a positive integer. Used as the `type` of an argument."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return number
