"""Evaluates the representations of an index on a benchmark; compares and pools evaluations.

    maxray evaluate jobs/specs/cranfield_evaluate.yaml
    maxray evaluate SPEC.yaml output=out/other "measures=[nDCG@10, R@100]"
    maxray evaluate SPEC.yaml "representations=[hpool_32]" --fit-fusion out/fusion.yaml
    maxray evaluate compare OUT_A OUT_B             # compares two evaluations, row by row
    maxray evaluate compare OUT --rows ROW ROW      # compares any two rows
    maxray evaluate pool OUT... --output FOLDER     # pools evaluations of several collections

`maxray evaluate compare --help` and `maxray evaluate pool --help` describe the last two.

The table has one row per representation and score, and one for BM25 over the text of the items
(bm25=false omits it). Relevance judgments refer to items or to their parents. The score of a parent
is that of its best item. The level is inferred from the ids. If it cannot be inferred, set
judged=item or judged=parent.

MaxSim rows have diagnostics (diagnostics=false omits them): OSR, the fraction of a relevant pair's
score with uncompressed tokens that is retained (SAP), and the share, evenness and similarity of the
stored vectors that queries match (AGC). Rows that differ only in their seed are averaged.

Optional analyses:

    grounding={num_phrases: 200}     BoxMass, RegionHit and CoverageIoU (SaMer) of phrases sampled
                                     from the text of the items, of a file: grounding=FILE.jsonl
                                     with lines {"item_id": ..., "phrase": ..., "boxes": [[x0, y0,
                                     x1, y1]]}, or of the benchmark: grounding=benchmark
    document_categories=modality     results by category of the relevant documents: an item column,
                                     or metadata.KEY
    candidates=[{generator: ivf}]    recall of the exact results and latency of a candidate
                                     generator, by the number of candidates
    rerank=[{name: edje, model: FOLDER}]  the gain and the cost of rerankers of the best results

scores=[maxsim,fused] adds rows with the fused score of MaxSim and BM25 (`maxray add candidates
INDEX bm25`), compared with MaxSim; `fusion` has its settings. --fit-fusion chooses the settings for
one representation and writes them to a file, which `fusion`, jobs.search and servers read. It
prints the quality on held-out queries. The result is MaxSim alone unless fusion is better on the
judged queries by two standard errors.

If `index` is the path of a federation (docs/tutorials/federation.md), the rows are its members and
`federation`, which is compared with each member. --fit-fusion writes the federation with fitted
weights, or the best member alone, by the same rule.

comparisons=[[hpool_32.maxsim, bm25]] are planned comparisons of any two rows, whose p-values are
corrected among themselves only.

The output folder receives report.html (all results on one page), metrics.csv, per_query.csv,
table.md, table.tex and table.csv (with intervals, for papers), runs/*.trec, the resolved spec.yaml,
plots (plots=pdf or svg for papers), and results.json, which other jobs read.
Finished computations are cached in entries/, so that a rerun computes only new or changed rows.
Bytes per item are reported for the vectors, and for all stored columns including token positions
and assignments.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from functools import partial

import jobs
from pipeline import config


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and evaluates."""
    if jobs.run_form(FORMS, arguments):
        return
    parser = jobs.spec_parser(__doc__, profiles=False, has_index=True)
    parser.add_argument(
        "--fit-fusion", metavar="OUT", help="fit the fused score and write its settings"
    )
    args = parser.parse(arguments)
    if args.fit_fusion is not None:
        _fit_fusion(args.spec, args.overrides, args.fit_fusion)
        return

    from pipeline.eval import federation
    from pipeline.eval.evaluation import run
    from pipeline.eval.report.files import write
    from pipeline.eval.report.summary import summary
    from pipeline.eval.report.tables import candidates_table, comparisons_table, table
    from pipeline.eval.spec import EvaluateSpec
    from pipeline.search.map_images import hit_maps

    spec = config.load(EvaluateSpec, args.spec, args.overrides)
    report = partial(jobs.say, is_timed=False)
    is_federation = jobs.is_spec(spec.index)
    evaluation = federation.run(spec, report) if is_federation else run(spec, report, hit_maps)
    written = [posixpath.join(spec.output, "runs"), *write(evaluation, spec.output)]
    print("", table(evaluation).text(), sep="\n")
    if spec.candidates:
        print("", candidates_table(evaluation).text(), sep="\n")
    if evaluation.planned_comparisons:
        print("", comparisons_table(evaluation).text(), sep="\n")
    print("", *summary(evaluation), "", *written, sep="\n")


def _fit_fusion(path: str, overrides: Sequence[str], out: str) -> None:
    from pipeline.eval.federation import fit_weights
    from pipeline.eval.fusion_fit import JudgedPools, fit_fusion
    from pipeline.eval.spec import EvaluateSpec
    from pipeline.runtime.atomic import check_writable, write_atomic

    check_writable(out, "fit-fusion", as_file=True)
    spec = config.load(EvaluateSpec, path, overrides)
    is_federation = jobs.is_spec(spec.index)
    fit = fit_weights(spec) if is_federation else fit_fusion(JudgedPools.read(spec))
    write_atomic(out, fit.to_yaml())
    print(f"{fit.to_yaml()}\n{out}")


def _compare(arguments: Sequence[str]) -> None:
    """Compares two evaluations on the same queries, row by row.

        maxray evaluate compare out/cranfield/evaluation out/layer5/evaluation
        maxray evaluate compare OUT_A OUT_B --output FOLDER
        maxray evaluate compare OUT --rows mine_32.maxsim hpool_32.maxsim --rows mine_32.maxsim bm25

    OUT_A and OUT_B are output folders of jobs.evaluate. The job prints the means of the rows that
    both evaluations have, their difference, and the p-value of a paired randomisation test with
    Holm's correction over the rows. With --output, it writes compare.html and compare.csv with all
    measures.

    --rows compares two rows of any names, the first of OUT_A and the second of OUT_B (default:
    OUT_A), with the 95 % interval of the difference. Its p-values are corrected over the pairs.
    """
    parser = jobs.parser(_compare.__doc__, "compare")
    parser.add_argument("out_a", metavar="OUT_A", help="output folder of an evaluation")
    parser.add_argument(
        "out_b", nargs="?", metavar="OUT_B", help="output folder of another evaluation"
    )
    parser.add_argument("--output", metavar="FOLDER", help="write compare.html and compare.csv")
    parser.add_argument(
        "--rows", nargs=2, action="append", metavar="ROW", help="compare two rows (can be repeated)"
    )
    args = parser.parse(arguments)
    if args.rows and args.output:
        parser.error("--rows cannot be combined with --output")
    if not args.rows and not args.out_b:
        parser.error("OUT_B is required without --rows")
    jobs.check_outputs([args.out_a], "OUT_A")
    jobs.check_outputs([args.out_b or args.out_a], "OUT_B")

    from pipeline.eval.compare import compare, compare_pairs
    from pipeline.eval.report.compare import table
    from pipeline.eval.report.files import write_comparison
    from pipeline.eval.report.tables import pairs_table
    from pipeline.runtime.atomic import check_writable

    if args.rows:
        compared_pairs = compare_pairs(args.out_a, args.out_b or args.out_a, args.rows)
        print(pairs_table(*compared_pairs).text())
        return
    if args.output:
        check_writable(args.output, "--output")
    compared = compare(args.out_a, args.out_b)
    print(table(compared).text())
    for output, names in zip(compared.outputs, compared.unmatched, strict=True):
        if names:
            print(f"only in {output}: {', '.join(names)}")
    if args.output:
        print(*write_comparison(compared, args.output), sep="\n")


def _pool(arguments: Sequence[str]) -> None:
    """Pools evaluations of several collections: means, standard deviations and significance.

        maxray evaluate pool out/layers/*/evaluation --output out/layers/pooled
        maxray evaluate pool OUT OUT OUT --output FOLDER --against random "eos layers=[5]"

    Each OUT is an output folder of jobs.evaluate with the same methods, on collections that are
    random draws of the same distribution. The job prints OSR and quality of each method (mean and
    standard deviation over the collections), and the p-value of its OSR against other methods at
    the same budget (paired randomisation test over all queries, with Holm's correction over the
    rows). It writes table.md, pooled.csv and the figures of jobs.evaluate, such as
    osr_by_layer.png.
    """
    parser = jobs.parser(_pool.__doc__, "pool")
    parser.add_argument("outputs", nargs="+", metavar="OUT", help="output folder of an evaluation")
    parser.add_argument("--output", metavar="FOLDER", required=True, help="output folder")
    parser.add_argument(
        "--against",
        nargs="+",
        default=["random"],
        metavar="METHOD",
        help="methods to compare with (default: random)",
    )
    # Intermixed parsing does not support options with several values.
    args = parser.parse_args(arguments)
    if len(args.outputs) < 2:
        parser.error("at least two OUT are required")
    jobs.check_outputs(args.outputs, "OUT")

    from pipeline.eval.pooled import pool
    from pipeline.eval.report.files import write_pooled
    from pipeline.eval.report.tables import pooled_table
    from pipeline.runtime.atomic import check_writable

    check_writable(args.output, "output")
    pooled = pool(args.outputs)
    cells = pooled_table(pooled, args.against)
    print(cells.text())
    print(*write_pooled(pooled, cells, args.output), sep="\n")


FORMS: dict[str, jobs.Form] = {"compare": _compare, "pool": _pool}


if __name__ == "__main__":
    jobs.run(main)
