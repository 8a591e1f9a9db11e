"""Runs the tables of the papers, downloads their data, and runs studies of their methods.

    python -m examples.papers get [PAPER [TABLE] | NAME...]
    python -m examples.papers run PAPER TABLE [--miniature | --check]
    python -m examples.papers study SPEC
    python -m examples.papers positions SPEC
    python -m examples.papers binding
    python -m examples.papers shapes FOLDER

`python -m examples.papers VERB --help` describes a verb.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import jobs

VERBS = ("get", "run", "study", "positions", "binding", "shapes")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the verb that the first argument names."""
    if jobs.run_form({verb: _verb(verb) for verb in VERBS}, arguments):
        return
    parser = jobs.parser(__doc__)
    parser.add_argument("verb", choices=VERBS, help="what to do")
    parser.parse(arguments)


def _verb(name: str) -> jobs.Form:
    return lambda arguments: importlib.import_module(f"{__package__}.verbs.{name}").main(arguments)


if __name__ == "__main__":
    jobs.run(main)
