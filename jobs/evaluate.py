"""Evaluates an index on a benchmark: every representation under every score, in one table.

    python -m jobs.evaluate jobs/specs/cranfield_evaluate.yaml
    python -m jobs.evaluate SPEC.yaml output=out/other "measures=[nDCG@10, R@100]"

Beside the representations stands BM25 over the items' texts (bm25=false leaves it out). Judgments
name items, or their parents, of which the best item counts; which of them is inferred from the ids.
If it cannot be inferred, the job ends and asks for judged=item or judged=parent.

Late rows are diagnosed too (diagnostics=false leaves it out): OSR, the share of a relevant pair's
score with the full tokens that is left (SAP); which stored vectors are ever matched, how evenly and
how alike they are (AGC). Rows that differ in their seed alone are one row, their mean. Three fields
add what is only done if asked for:

    grounding={num_phrases: 200}     BoxMass, RegionHit, CoverageIoU (SaMer) of phrases drawn from
                                     the items' text, or of a file: grounding=phrases.jsonl with
                                     lines {"item_id": ..., "phrase": ..., "boxes": [[x0,y0,x1,y1]]}
    kinds=modality                   a table by kind of the relevant documents: an item column, or
                                     metadata.KEY
    rerank=[{model: FOLDER}]         rows of an EDJE that reranks a first stage (docs/rerank.md)

Fields of the benchmark's queries that hold categories have a table each. The report says what
compressors and codecs were fitted on, and how many of these items are evaluated.

Writes into the spec's `output`: report.html (everything, on one page), metrics.csv, per_query.csv,
table.md, quality_bytes.png, runs/*.trec, spec.yaml (the resolved spec) and results.json, which
jobs.compare reads; where there is what they show also index_utilisation.png, quality_retention.png
(budgets that are ratios), osr_by_layer.png (methods at several single layers),
reranking_by_depth.png (a reranker at several depths), diagnostics_quality.png, kinds.csv and
categories.csv. What was computed stays in cells/: the next run computes only what is new or
changed. Bytes per item are of the stored numbers: of the vectors only, and of everything (with
assignments and the token positions that mark words).
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
    from pipeline.report.tables import table
    from pipeline.report.text import aligned
    from pipeline.search.map_images import hit_maps

    spec = config.load(EvaluateSpec, args.spec, args.overrides)
    evaluation = run(spec, lambda line: print(line, flush=True), hit_maps)
    written = [posixpath.join(spec.output, "runs"), *write(evaluation, spec.output)]
    print("", aligned(table(evaluation)), "", *summary(evaluation), "", *written, sep="\n")


if __name__ == "__main__":
    jobs.run(main)
