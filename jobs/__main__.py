"""Entry point of the `maxray` command.

`maxray VERB ...` is equivalent to `python -m jobs.VERB ...`.
"""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import jobs
from pipeline import config

#: What a first user needs, in front of the list of verbs.
FIRST_STEPS = """\
maxray VERB ...

  maxray index papers/                      index a folder of files
  maxray search papers/ "a question"        print the passages that answer it
  maxray serve papers/                      open the index in a browser
  maxray VERB --help                        describe a verb
"""


def verbs() -> dict[str, str]:
    """Reads the first docstring line of each job without importing the job."""
    folder = Path(jobs.__file__).parent
    files = {file.stem: file for file in folder.glob("[!_]*.py")}
    packages = {file.parent.name: file for file in folder.glob("*/__main__.py")}
    return {verb: _first_line(file) for verb, file in sorted({**files, **packages}.items())}


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def forms(verb: str) -> Mapping[str, jobs.Form]:
    """Returns the forms of a verb, by name."""
    found: Mapping[str, jobs.Form] = getattr(importlib.import_module(f"jobs.{verb}"), "FORMS", {})
    return found


def _suggestion(unknown: str, known: Collection[str]) -> str:
    """Suggests the form that is called like an unknown verb, or else a similar verb."""
    for verb in known:
        if unknown in forms(verb):
            return f"; did you mean '{verb} {unknown}'?"
    return config.close_match(unknown, known)


def main() -> None:
    """Runs the job that the first argument names. Without arguments, lists all jobs."""
    jobs.prepare_output()
    jobs_by_verb = verbs()
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb not in jobs_by_verb:
        is_unknown = verb not in ("-h", "--help", "help")
        if is_unknown:
            match = _suggestion(verb, jobs_by_verb)
            print(f"error: unknown command {verb!r}{match}", file=sys.stderr)
        listing = "\n".join(f"  {name:10} {summary}" for name, summary in jobs_by_verb.items())
        print(f"{FIRST_STEPS}\n{listing}", file=sys.stderr if is_unknown else sys.stdout)
        sys.exit(2 if is_unknown else 0)
    sys.argv.pop(1)
    runpy.run_module(f"jobs.{verb}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
