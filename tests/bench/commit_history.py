"""Reads the history of the commits of an index from the versions of its dataset."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import lance

from pipeline.index.reader import ITEMS, part_uri


def commits(index: Path) -> list[tuple[float, int]]:
    """Returns the Unix time and the number of rows of each commit that added rows, oldest first."""
    found: list[tuple[float, int]] = []
    for version in lance.dataset(part_uri(str(index), ITEMS)).versions():
        rows = int(version["metadata"]["total_rows"])
        if rows > (found[-1][1] if found else 0):
            time = version["timestamp"]
            found.append((time.timestamp() if isinstance(time, datetime) else time / 1e9, rows))
    return found
