"""Several evaluations as one: of collections that differ by chance alone, with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.config import SpecError, digest
from pipeline.eval.diagnostics import mean_diagnosis, score_retention
from pipeline.eval.results import OSR, Evaluation, Result, in_order, mean_costs, read_results
from pipeline.eval.significance import holm, randomisation_p


def pool(outputs: Sequence[str]) -> Evaluation:
    """The evaluations in output folders of `jobs.evaluate` as one, over all of their queries.

    It has the rows and measures that all have. What a row's `seeds` are of a method that draws,
    they are here of the collections: `spread` is the standard deviation over them.

    Raises:
        SpecError: one is not there, two are of the same queries, or they share no measure or row.
    """
    evaluations = [read_results(output, "OUT") for output in outputs]
    judgments = [evaluation.judgments for evaluation in evaluations]
    for place, output in enumerate(outputs):
        if judgments[place] in judgments[:place]:
            problem = f"has the judged queries of {outputs[judgments.index(judgments[place])]}"
            raise SpecError("OUT", output, "an evaluation of another collection", problem)
    first, *others = evaluations
    measures = [m for m in first.measures if all(m in other.measures for other in others)]
    rows = [{row.name: row for row in evaluation.results} for evaluation in evaluations]
    names = [name for name in rows[0] if all(name in its for its in rows[1:])]
    if not measures or not names:
        lacks = "row" if measures else "measure"
        raise SpecError("OUT", list(outputs), f"evaluations with a common {lacks}", "have none")
    return replace(
        first,
        headline=first.headline if first.headline in measures else measures[0],
        judgments=digest(judgments),
        num_items=sum(evaluation.num_items for evaluation in evaluations),
        results=in_order([_pooled([its[name] for its in rows], measures) for name in names]),
        kinds={},
        categories={},
    )


def _pooled(rows: Sequence[Result], measures: Sequence[str]) -> Result:
    """A row of all collections; a query is called by its collection's number, then by its id."""
    diagnoses = [row.diagnosis for row in rows if row.diagnosis]
    diagnosis = None
    if len(diagnoses) == len(rows):
        pairs = {f"{i} {q}": own for i, d in enumerate(diagnoses) for q, own in d.pairs.items()}
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


def retained(row: Result) -> dict[str, float]:
    """The score retention of each query: the mean over its relevant pairs (SAP, equation 8)."""
    pairs = row.diagnosis.pairs if row.diagnosis else {}
    found = {query_id: score_retention(own) for query_id, own in pairs.items()}
    return {query_id: retention.mean for query_id, retention in found.items() if retention}


def retention_p_values(rows: Sequence[Result], methods: Sequence[str]) -> list[dict[str, float]]:
    """Returns p values of the OSR by row, for each of some methods to compare with.

    They are those of a paired randomisation test over the queries, between a row and the method's
    row at the same budget, corrected by Holm over the rows. Rows of the method itself have none.

    Raises:
        SpecError: No row is of one of the methods.
    """
    for name in methods:
        if all(row.method != name for row in rows):
            valid = dict.fromkeys(row.method for row in rows)
            raise SpecError.unknown_name("against", name, valid)
    retentions = {row.name: retained(row) for row in rows}
    return [_p_values(rows, retentions, method) for method in methods]


def _p_values(
    rows: Sequence[Result], retentions: dict[str, dict[str, float]], method: str
) -> dict[str, float]:
    others = {(row.budget, row.encoder): row.name for row in rows if row.method == method}
    p_values = {}
    for row in rows:
        other = retentions.get(others.get((row.budget, row.encoder), ""), {})
        own = retentions[row.name]
        gains = [own[query_id] - other[query_id] for query_id in own if query_id in other]
        if gains and row.method != method:
            p_values[row.name] = float(randomisation_p(np.array([gains]))[0])
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))
