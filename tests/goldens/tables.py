"""Values of one miniature table per paper."""

from __future__ import annotations

import contextlib
import csv
import io
from typing import Any

from examples.papers.verbs import run
from tests.examples.papers.verbs.test_run import DEFAULT
from tests.goldens.indexes import folder, number


def tables() -> dict[str, Any]:
    """Returns the cells of the tables, which share models and indexes, without times."""
    found: dict[str, Any] = {}
    for paper, table in sorted(DEFAULT):
        output = str(folder() / "miniatures")
        with contextlib.redirect_stdout(io.StringIO()):
            run.main([paper, table, "--miniature", "--output", output])
        found[f"{paper} {table}"] = cells = {}
        path = folder() / f"miniatures/papers/{paper}/{table}/table.csv"
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if "ms, " not in row["column"]:
                    cells[f"{row['row']} / {row['column']}"] = number(row["ours"])
    return found
