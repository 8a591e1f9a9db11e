"""Takes evaluations of several collections as one: means, their spread, and what is significant.

    python -m jobs.pool out/layers/*/evaluation --output out/layers/pooled
    python -m jobs.pool OUT OUT OUT --output FOLDER --against random "eos layers=[5]"

Each OUT is an output folder of jobs.evaluate, of the same methods on collections that differ by
chance alone. Prints OSR and quality of each method: mean and standard deviation over the
collections, and p of the OSR against other methods at the same budget (paired randomisation over
all queries, corrected over the rows by Holm). Writes table.md, pooled.csv and the figures that
jobs.evaluate writes, such as osr_by_layer.png.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and pools."""
    parser = jobs.parser(__doc__)
    parser.add_argument("outputs", nargs="+", metavar="OUT", help="the output of an evaluation")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="where to write")
    parser.add_argument(
        "--against", nargs="+", default=["random"], metavar="METHOD", help="default: random"
    )
    args = parser.parse_args(arguments)  # options with several values do not mix with others
    if len(args.outputs) < 2:
        parser.error("at least two OUT are required")
    jobs.check_outputs(args.outputs, "OUT")

    from pipeline.atomic import check_writable
    from pipeline.eval.pooled import pool
    from pipeline.report.files import write_pooled
    from pipeline.report.pooled import table
    from pipeline.report.text import aligned

    check_writable(args.output, "output")
    pooled = pool(args.outputs)
    cells = table(pooled, args.against)
    print(aligned(cells))
    print(*write_pooled(pooled, cells, args.output), sep="\n")


if __name__ == "__main__":
    jobs.run(main)
