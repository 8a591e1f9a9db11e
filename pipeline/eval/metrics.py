"""Measures by their ir-measures names, and runs in TREC's form.

A run is `{query id: {document id: score}}`. Equal scores are ordered as trec_eval does, so a
number here is the one that trec_eval gives for the written run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ir_measures

from pipeline.atomic import write_atomic
from pipeline.config import SpecError
from pipeline.eval.topics import lines_of

Run = Mapping[str, Mapping[str, float]]

DEFAULT_MEASURES = ("nDCG@10", "R@10", "R@100", "RR@10", "AP")


def parse_measure(name: str) -> ir_measures.Measure:
    """The measure of that name; grades count linearly in nDCG, as in trec_eval.

    Raises:
        SpecError: no such measure.
    """
    try:
        return ir_measures.parse_measure(name)
    except (NameError, ValueError):
        legal = f"names of ir-measures such as {', '.join(DEFAULT_MEASURES)}"
        raise SpecError("measures", name, legal) from None


def per_query(
    run: Run, qrels: Mapping[str, Mapping[str, int]], measures: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Each measure for each judged query: `{query id: {measure: value}}`.

    A judged query that the run lacks counts 0; a query of the run without judgments is left out.

    >>> per_query({"q": {"a": 2.0, "b": 1.0}}, {"q": {"b": 1}, "r": {"c": 1}}, ["RR@10"])
    {'q': {'RR@10': 0.5}, 'r': {'RR@10': 0.0}}
    """
    parsed = {parse_measure(name): name for name in measures}
    values = {query_id: dict.fromkeys(measures, 0.0) for query_id in qrels}
    ranked = {query_id: dict(run[query_id]) for query_id in qrels if run.get(query_id)}
    for metric in ir_measures.iter_calc(list(parsed), dict(qrels), ranked):
        values[metric.query_id][parsed[metric.measure]] = float(metric.value)
    return values


def means(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over the queries.

    >>> means({"q": {"RR@10": 0.5}, "r": {"RR@10": 0.0}})
    {'RR@10': 0.25}
    """
    rows = list(values.values())
    return {name: sum(row[name] for row in rows) / len(rows) for name in (rows[0] if rows else ())}


def write_run(uri: str, run: Run, tag: str) -> None:
    """Writes lines `query Q0 document rank score tag`, whole or not at all.

    Raises:
        SpecError: an id holds white space, which the format cannot express.
    """
    lines = []
    for query_id, scores in run.items():
        _check_id(query_id)
        ranked = sorted(scores.items(), key=lambda entry: -entry[1])  # stable: ties stay in order
        for rank, (document_id, score) in enumerate(ranked, start=1):
            _check_id(document_id)
            lines.append(f"{query_id} Q0 {document_id} {rank} {score:.9g} {tag}\n")
    write_atomic(uri, "".join(lines))


def _check_id(name: str) -> None:
    if name.split() != [name]:
        raise SpecError("run", name, "ids without white space", "cannot stand in a TREC run")


def read_run(uri: str) -> dict[str, dict[str, float]]:
    """Reads what `write_run` or another system wrote.

    Raises:
        SpecError: no such file, or a line that does not have TREC's six columns.
    """
    run: dict[str, dict[str, float]] = {}
    for number, line in lines_of(uri, "run"):
        try:
            query_id, _, document_id, _, score, _ = line.split()
            run.setdefault(query_id, {})[document_id] = float(score)
        except ValueError:
            legal = "query Q0 document rank score tag"
            raise SpecError("run", line[:80], legal, f"stands in line {number} of {uri}") from None
    return run
