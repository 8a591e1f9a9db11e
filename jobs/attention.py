"""Draws which tokens of an item the appended tokens of an encoder attend to.

    maxray attention OUT.png scene.png --model out/agc/shapes/agc_16_seed-0/model
    maxray attention OUT.png abstract.txt --model encoder.yaml --tokens 0
    maxray attention OUT.png report.pdf#page=2 --model encoder.yaml

MODEL is a folder of a trained model with appended tokens, or a YAML file with the fields of an
encoder. Items are images (.png, .jpg, .webp), pages of PDF files, which an encoder without image
input reads by their text layer, or texts. The output has a row per item and model with the item,
the mean attention of the appended tokens in the last layer (the saliency of AGC), the groups of AGC
with their centroids outlined, and the attention of the first appended tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jobs
from pipeline.config import check_exists


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and draws the maps."""
    parser = jobs.parser(__doc__)
    parser.add_argument("out", metavar="OUT", help="output file (.png)")
    parser.add_argument("items", nargs="+", metavar="ITEM", help="image, PDF page or text file")
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        required=True,
        metavar="MODEL",
        help="folder of a trained model, or an encoder spec (.yaml); may be repeated",
    )
    parser.add_argument(
        "--tokens",
        type=_count,
        default=4,
        metavar="N",
        help="number of appended tokens to draw individually (default: 4)",
    )
    args = parser.parse(arguments)
    for path in args.items:
        check_exists(path.partition("#page=")[0], "items")
    for path in args.models:
        check_exists(path, "model", "the folder of a trained model or a YAML file")

    from pipeline.atomic import check_writable, write_atomic
    from pipeline.search.attention_maps import attention_sheet

    check_writable(args.out, "OUT", as_file=True)
    write_atomic(args.out, attention_sheet(args.models, args.items, args.tokens))
    print(args.out)


def _count(text: str) -> int:
    """Parses an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


if __name__ == "__main__":
    jobs.run(main)
