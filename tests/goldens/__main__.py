"""Writes the golden values of parts, or checks them: `python -m tests.goldens check [PART...]`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jobs
from pipeline.index import EXECUTOR
from tests.conftest import ROOT
from tests.goldens import files, http, indexes, learners, surface, tables

#: Parts, and whether they need a Ray cluster.
PARTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "columns": (indexes.columns, True),
    "metrics": (indexes.metrics, True),
    "http": (http.responses, True),
    "learners": (learners.learners, False),
    "tables": (tables.tables, True),
    "surface": (surface.surface, False),
}


def main() -> int:
    """Computes the parts and writes or checks them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
    parser.add_argument("verb", choices=["write", "check"])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args()
    os.environ[EXECUTOR] = "process"  # an actor would start a process in each job
    os.environ["MAXRAY_CACHE"] = str(indexes.folder() / "cache")
    num_differences = 0
    with contextlib.ExitStack() as stack:
        if any(PARTS[part][1] for part in args.parts or PARTS):
            stack.enter_context(jobs.cluster(1 << 28))
        for part in args.parts or PARTS:
            start = time.perf_counter()
            text = json.dumps(PARTS[part][0](), ensure_ascii=False)
            for place, name in ((str(indexes.folder()), "FOLDER"), (str(ROOT), "ROOT")):
                text = text.replace(place, name)
            values = json.loads(text)
            if args.verb == "write":
                files.write(part, values)
            else:
                for line in files.differences(part, values):
                    print(line)
                    num_differences += 1
            print(f"{part}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return int(num_differences > 0)


if __name__ == "__main__":
    sys.exit(main())
