"""Measures how well an encoder binds attributes (SMART, section 4.1 and appendix A).

    python -m examples.papers binding
    python -m examples.papers binding layer=3 --output out/binding
    python -m examples.papers binding --encoder ENCODER.yaml --form rendered --side 896
    python -m examples.papers binding --table TABLE.yaml --output out/binding
    python -m examples.papers binding --write data/binding

The benchmark has 40 pairs of reports with 5 x 5 panels. Each panel labels a marker with a code; in
the hard negative, the same codes label other markers. The accuracy is the fraction of the 1,000
queries that score the correct report higher. Ties count as errors. The job prints it for the
single-vector, MaxSim and hybrid scores with a 95 % bootstrap confidence interval over the pairs.

With --output, it writes binding.csv and binding.png. With --table, it measures all encoders of a
file, which also defines `form` and `side`, and prints one row per encoder with the mean over seeds.
With --write, it only writes the pairs as images, for `python -m examples.papers run smart figure2`.
"""

from __future__ import annotations

import argparse
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jobs
from pipeline import config
from pipeline.config import SpecError

if TYPE_CHECKING:
    from examples.papers.synthetic.binding import Pair
    from examples.papers.synthetic.binding_data import Form
    from pipeline.runtime.text import Table


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures."""
    parser = jobs.parser(__doc__)
    parser.add_argument(
        "overrides", nargs="*", default=[], help="field=value assignments in the encoder or table"
    )
    parser.add_argument(
        "--encoder",
        metavar="SPEC",
        help="YAML spec of an encoder, or one with a field `encoder` (default: minilm)",
    )
    parser.add_argument("--table", metavar="SPEC", help="YAML file with encoders as `rows`")
    parser.add_argument(
        "--form", choices=("text", "rendered"), help="form of the reports (default: text)"
    )
    parser.add_argument("--side", type=jobs.positive, help="side of a rendered report, in pixels")
    parser.add_argument(
        "--pairs", type=jobs.positive, default=40, help="number of pairs (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the reports (default: 0)")
    parser.add_argument("--output", metavar="FOLDER", help="folder for binding.csv and binding.png")
    parser.add_argument("--write", metavar="FOLDER", help="folder for the reports as images")
    args = parser.parse(arguments)
    for option in ("encoder", "table"):
        if path := getattr(args, option):
            config.read(path, f"--{option}")

    from examples.papers.synthetic.binding import MIN_SIDE, SIDE
    from examples.papers.synthetic.binding_data import evaluation_pairs
    from pipeline.runtime.atomic import check_writable

    side = args.side or SIDE
    if side < MIN_SIDE:
        raise SpecError("--side", side, f"an integer >= {MIN_SIDE}")
    if args.seed < 0:
        raise SpecError("--seed", args.seed, "an integer >= 0")
    if args.output:
        check_writable(args.output, "--output")
    pairs = evaluation_pairs(args.pairs, args.seed)
    if args.write:
        from examples.papers.synthetic.binding_files import write_collection

        check_writable(args.write, "--write")
        write_collection(Path(config.absolute(args.write)), pairs, side)
        print(f"{args.write}: {len(pairs)} pairs of reports")
        return

    if args.table:
        _table(args, pairs)
    else:
        _accuracy(args, pairs, side)


def _table(args: argparse.Namespace, pairs: Sequence[Pair]) -> None:
    from examples.papers.synthetic import binding_table

    options = {"--encoder": args.encoder, "--form": args.form, "--side": args.side}
    for option, value in options.items():
        if value:
            raise SpecError(option, value, f"omitted, because {args.table} defines it")
    spec = config.load(binding_table.TableSpec, args.table, args.overrides)
    binding_table.check(spec)
    rows = binding_table.measure(spec, pairs, jobs.say)
    print(binding_table.table(rows).text())
    if args.output:
        _write(args.output, binding_table.full_table(rows), binding_table.plot(rows, spec.title))


def _accuracy(args: argparse.Namespace, pairs: Sequence[Pair], side: int) -> None:
    from examples.papers.synthetic import binding_accuracy
    from pipeline.registry import ENCODERS

    form: Form = args.form or "text"
    in_encoder = [f"encoder.{override}" for override in args.overrides]
    spec_file = config.read(args.encoder, "--encoder") if args.encoder else {"name": "minilm"}
    # The spec of a job has an encoder but no name. That of the encoder smart has both.
    encoder = spec_file if "name" in spec_file else spec_file.get("encoder", spec_file)
    fields = config.override({"encoder": encoder}, in_encoder)
    with config.within("encoder"):
        spec = ENCODERS.resolve(fields["encoder"])
        ENCODERS.load(spec.name).check(spec)
    binding_accuracy.check_form(spec, form)
    rows = binding_accuracy.measure(ENCODERS.build(spec), pairs, form, side)
    table = binding_accuracy.table(rows)
    print(table.text())
    if args.output:
        _write(args.output, table, binding_accuracy.bars(rows))


def _write(folder: str, table: Table, png: bytes) -> None:
    from pipeline.runtime.atomic import write_atomic

    files: dict[str, str | bytes] = {"binding.csv": table.csv(), "binding.png": png}
    for name, data in files.items():
        path = posixpath.join(folder, name)
        write_atomic(path, data)
        print(path)


if __name__ == "__main__":
    jobs.run(main)
