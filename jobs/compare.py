"""Compares two evaluations on the same queries, row by row.

    maxray compare out/cranfield/evaluation out/layer5/evaluation
    maxray compare OUT_A OUT_B --output FOLDER

OUT_A and OUT_B are output folders of jobs.evaluate. The job prints the means of the rows that both
evaluations have, their difference, and the p-value of a paired randomisation test with Holm's
correction over the rows. With --output, it writes compare.html and compare.csv with all measures.
"""

from __future__ import annotations

from collections.abc import Sequence

import jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and compares."""
    parser = jobs.parser(__doc__)
    parser.add_argument("out_a", metavar="OUT_A", help="output folder of an evaluation")
    parser.add_argument("out_b", metavar="OUT_B", help="output folder of another evaluation")
    parser.add_argument("--output", metavar="FOLDER", help="write compare.html and compare.csv")
    args = parser.parse(arguments)
    jobs.check_outputs([args.out_a], "OUT_A")
    jobs.check_outputs([args.out_b], "OUT_B")

    from pipeline.atomic import check_writable
    from pipeline.eval.compare import compare
    from pipeline.report.compare import table
    from pipeline.report.files import write_comparison

    if args.output:
        check_writable(args.output, "--output")
    compared = compare(args.out_a, args.out_b)
    print(table(compared).text())
    for output, names in zip(compared.outputs, compared.unmatched, strict=True):
        if names:
            print(f"only in {output}: {', '.join(names)}")
    if args.output:
        print(*write_comparison(compared, args.output), sep="\n")


if __name__ == "__main__":
    jobs.run(main)
