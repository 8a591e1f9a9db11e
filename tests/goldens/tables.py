"""Values of one miniature table per paper."""

from __future__ import annotations

import csv
from typing import Any

from tests.goldens.indexes import folder, job, number
from tests.jobs.test_reproduce import DEFAULT


def tables() -> dict[str, Any]:
    """Returns the cells of the tables, which share models and indexes."""
    found: dict[str, Any] = {}
    for paper, table in sorted(DEFAULT):
        job("reproduce", paper, table, "--miniature", "--output", folder() / "miniatures")
        found[f"{paper} {table}"] = cells = {}
        path = folder() / f"miniatures/papers/{paper}/{table}/table.csv"
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                cells[f"{row['row']} / {row['column']}"] = number(row["ours"])
    return found
