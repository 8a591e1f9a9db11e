"""Evaluates the representations of an index on a benchmark.

    python -m jobs.evaluate jobs/specs/cranfield_evaluate.yaml
    python -m jobs.evaluate SPEC.yaml output=out/other "measures=[nDCG@10, R@100]"

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
    candidates=[{generator: lemur}]  recall of the exact results and latency of a candidate
                                     generator, by the number of candidates
    rerank=[{model: FOLDER}]         rows with candidates of a first stage reranked by EDJE

The output folder receives report.html (all results on one page), metrics.csv, per_query.csv,
table.md, runs/*.trec, the resolved spec.yaml, plots, and results.json, which jobs.compare reads.
Finished computations are cached in entries/, so that a rerun computes only new or changed rows.
Bytes per item are reported for the vectors, and for all stored columns including token positions
and assignments.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

import jobs
from pipeline import config


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and evaluates."""
    args = jobs.spec_parser(__doc__, profiles=False, has_index=True).parse(arguments)

    from pipeline.eval.evaluation import run
    from pipeline.eval.spec import EvaluateSpec
    from pipeline.report.files import write
    from pipeline.report.summary import summary
    from pipeline.report.tables import candidates_table, table
    from pipeline.report.text import aligned
    from pipeline.search.map_images import hit_maps

    spec = config.load(EvaluateSpec, args.spec, args.overrides)
    evaluation = run(spec, lambda line: print(line, flush=True), hit_maps)
    written = [posixpath.join(spec.output, "runs"), *write(evaluation, spec.output)]
    print("", aligned(table(evaluation)), sep="\n")
    if spec.candidates:
        print("", aligned(candidates_table(evaluation)), sep="\n")
    print("", *summary(evaluation), "", *written, sep="\n")


if __name__ == "__main__":
    jobs.run(main)
