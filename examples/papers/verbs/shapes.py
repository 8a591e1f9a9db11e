r"""Generates the shapes benchmark: images of coloured shapes, captions, judgments and boxes.

    python -m examples.papers shapes out/shapes --count 1000
    maxray index jobs/specs/shapes.yaml source.path=out/shapes/images
    maxray evaluate jobs/specs/shapes_evaluate.yaml benchmark.path=out/shapes \
grounding=out/shapes/phrases.jsonl

The shipped models were not trained on these images. The output depends only on count and series.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jobs
from pipeline.config import absolute


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and generates the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="output folder")
    parser.add_argument(
        "--count", type=jobs.positive, default=1000, help="number of images (default: 1000)"
    )
    parser.add_argument(
        "--series",
        type=int,
        default=0,
        metavar="N",
        help="number of the validation series (default: 0); series have no images in common",
    )
    args = parser.parse(arguments)

    from examples.papers.synthetic.shapes_data import VALIDATION_SERIES
    from examples.papers.synthetic.shapes_files import write_collection
    from pipeline.config import SpecError
    from pipeline.runtime.atomic import check_writable

    if not 0 <= args.series < VALIDATION_SERIES:
        raise SpecError("series", args.series, f"an integer from 0 to {VALIDATION_SERIES - 1}")
    check_writable(args.folder, "FOLDER")
    write_collection(Path(absolute(args.folder)), args.count, args.series)
    print(f"{args.folder}: {args.count} scenes with captions, judgments and boxes")


if __name__ == "__main__":
    jobs.run(main)
