"""`maxray VERB ...` is `python -m jobs.VERB ...`; without a verb it lists them."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import jobs
from pipeline import config


def verbs() -> dict[str, str]:
    """The jobs and the first line of what each says of itself, read without importing them."""
    folder = Path(jobs.__file__).parent
    files = {file.stem: file for file in folder.glob("[!_]*.py")}
    packages = {file.parent.name: file for file in folder.glob("*/__main__.py")}
    return {verb: _first_line(file) for verb, file in sorted({**files, **packages}.items())}


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def main() -> None:
    """Runs the job that the first argument names."""
    there = verbs()
    if len(sys.argv) < 2 or sys.argv[1] not in there:
        asked = sys.argv[1:2]
        listing = "\n".join(f"  {name:10} {about}" for name, about in there.items())
        unknown = asked and asked[0] not in ("-h", "--help", "help")
        if unknown:
            match = config.close_match(asked[0], there)
            print(f"error: unknown command {asked[0]!r}{match}", file=sys.stderr)
        print(f"maxray VERB ...\n\n{listing}", file=sys.stderr if unknown else sys.stdout)
        sys.exit(2 if unknown else 0)
    verb = sys.argv.pop(1)
    runpy.run_module(f"jobs.{verb}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
