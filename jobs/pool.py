"""Pools evaluations of several collections: means, standard deviations and significance.

    maxray pool out/layers/*/evaluation --output out/layers/pooled
    maxray pool OUT OUT OUT --output FOLDER --against random "eos layers=[5]"

Each OUT is an output folder of jobs.evaluate with the same methods, on collections that are random
draws of the same distribution. The job prints OSR and quality of each method (mean and standard
deviation over the collections), and the p-value of its OSR against other methods at the same budget
(paired randomisation test over all queries, with Holm's correction over the rows). It writes
table.md, pooled.csv and the figures of jobs.evaluate, such as osr_by_layer.png.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and pools."""
    parser = jobs.parser(__doc__)
    parser.add_argument("outputs", nargs="+", metavar="OUT", help="output folder of an evaluation")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="output folder")
    parser.add_argument(
        "--against",
        nargs="+",
        default=["random"],
        metavar="METHOD",
        help="methods to compare with (default: random)",
    )
    args = parser.parse_args(
        arguments
    )  # intermixed parsing does not support options with several values
    if len(args.outputs) < 2:
        parser.error("at least two OUT are required")
    jobs.check_outputs(args.outputs, "OUT")

    from pipeline.atomic import check_writable
    from pipeline.eval.pooled import pool
    from pipeline.report.files import write_pooled
    from pipeline.report.pooled import table

    check_writable(args.output, "output")
    pooled = pool(args.outputs)
    cells = table(pooled, args.against)
    print(cells.text())
    print(*write_pooled(pooled, cells, args.output), sep="\n")


if __name__ == "__main__":
    jobs.run(main)
