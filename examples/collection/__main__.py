"""`python -m examples.collection build DATA [--slice 1k|10k|100k|all]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples.collection.build import SLICES, build


def main() -> int:
    """Runs a command; 2 if a package is missing."""
    parser = argparse.ArgumentParser(prog="python -m examples.collection")
    verbs = parser.add_subparsers(dest="verb", required=True)
    command = verbs.add_parser("build", help="download, extract and write passages and queries")
    command.add_argument("data", type=Path)
    command.add_argument("--slice", choices=SLICES, default="1k")
    arguments = parser.parse_args()
    missing = build(arguments.data, arguments.slice)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
