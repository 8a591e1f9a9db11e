"""Pooling of evaluations on collections that are random draws of the same distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.config import SpecError, digest
from pipeline.eval.diagnostics import mean_diagnosis, score_retention
from pipeline.eval.results import OSR, Evaluation, Result, mean_costs, read_results, sort_results
from pipeline.eval.significance import holm, randomisation_p


def pool(outputs: Sequence[str]) -> Evaluation:
    """Pools the evaluations in several output folders of `jobs.evaluate` over all queries.

    The result contains the rows and metrics that are part of all evaluations. The `seeds` of a row
    are the collections. Its `spread` is therefore the standard deviation over collections.
    """
    evaluations = [read_results(output, "OUT") for output in outputs]
    judgments = [evaluation.judgments for evaluation in evaluations]
    for i, output in enumerate(outputs):
        if judgments[i] in judgments[:i]:
            problem = f"has the judged queries of {outputs[judgments.index(judgments[i])]}"
            raise SpecError("OUT", output, "an evaluation of another collection", problem)
    first, *others = evaluations
    measures = [m for m in first.measures if all(m in other.measures for other in others)]
    rows = [{row.name: row for row in evaluation.results} for evaluation in evaluations]
    names = [name for name in rows[0] if all(name in by_name for by_name in rows[1:])]
    if not measures or not names:
        lacks = "row" if measures else "measure"
        raise SpecError(
            "OUT", list(outputs), f"evaluations with a common {lacks}", f"have no common {lacks}"
        )
    return replace(
        first,
        spec={**first.spec, "comparisons": []},  # planned for the queries of one collection
        headline=first.headline if first.headline in measures else measures[0],
        judgments=digest(judgments),
        num_items=sum(evaluation.num_items for evaluation in evaluations),
        results=sort_results(
            [_pooled([by_name[name] for by_name in rows], measures) for name in names]
        ),
        document_categories={},
        query_categories={},
    )


def _pooled(rows: Sequence[Result], measures: Sequence[str]) -> Result:
    """Pools the rows of all collections. Query ids get the number of the collection as a prefix."""
    diagnoses = [row.diagnosis for row in rows if row.diagnosis]
    diagnosis = None
    if len(diagnoses) == len(rows):
        pairs = {
            f"{i} {q}": scores for i, d in enumerate(diagnoses) for q, scores in d.pairs.items()
        }
        diagnosis = replace(mean_diagnosis(diagnoses), pairs=pairs)
    return replace(
        rows[0],
        values={
            f"{i} {query_id}": {name: values[name] for name in measures}
            for i, row in enumerate(rows)
            for query_id, values in row.values.items()
        },
        **mean_costs(rows),
        diagnosis=diagnosis,
        grounding={
            name: float(np.mean([row.grounding[name] for row in rows]))
            for name in rows[0].grounding
            if all(name in row.grounding for row in rows)
        },
        seeds={
            str(i): {
                **{name: row.means[name] for name in measures},
                **({OSR: row.retention.mean} if row.retention else {}),
            }
            for i, row in enumerate(rows)
        },
    )


def query_retention(row: Result) -> dict[str, float]:
    """Computes the OSR of each query as the mean over its relevant pairs (SAP, eq. 8)."""
    pairs = row.diagnosis.pairs if row.diagnosis else {}
    retentions = {query_id: score_retention(scores) for query_id, scores in pairs.items()}
    return {query_id: retention.mean for query_id, retention in retentions.items() if retention}


def retention_p_values(rows: Sequence[Result], methods: Sequence[str]) -> list[dict[str, float]]:
    """Computes p values of the OSR of each row, compared with some reference methods.

    A paired randomisation test over all queries compares the row with the row of the reference
    method at the same budget. Holm's correction is applied over the rows. The rows of a reference
    method are not compared with the method itself.
    """
    for name in methods:
        if all(row.method != name for row in rows):
            valid = dict.fromkeys(row.method for row in rows)
            raise SpecError.unknown_name("against", name, valid)
    retentions = {row.name: query_retention(row) for row in rows}
    return [_p_values(rows, retentions, method) for method in methods]


def _p_values(
    rows: Sequence[Result], retentions: dict[str, dict[str, float]], method: str
) -> dict[str, float]:
    others = {(row.budget, row.encoder): row.name for row in rows if row.method == method}
    p_values = {}
    for row in rows:
        other = retentions.get(others.get((row.budget, row.encoder), ""), {})
        retention = retentions[row.name]
        gains = [retention[q] - other[q] for q in retention if q in other]
        if gains and row.method != method:
            p_values[row.name] = float(randomisation_p(np.array([gains]))[0])
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))
