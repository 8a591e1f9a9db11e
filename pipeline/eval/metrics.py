"""Measures by their ir-measures names, and runs in TREC's form.

A run is `{query id: {document id: score}}`. Equal scores are ordered as trec_eval does, so a
number here is the one that trec_eval gives for the written run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote, unquote

import ir_measures

from pipeline.atomic import writing_atomic
from pipeline.config import SpecError
from pipeline.eval.topics import lines_of

Run = Mapping[str, Mapping[str, float]]

DEFAULT_MEASURES = ("nDCG@5", "nDCG@10", "R@5", "R@10", "R@100", "RR@10", "AP")


def parse_measure(name: str) -> ir_measures.Measure:
    """The measure of that name; grades count linearly in nDCG, as in trec_eval.

    Raises:
        SpecError: no such measure.
    """
    legal = f"names of ir-measures such as {', '.join(DEFAULT_MEASURES)}"
    try:
        measure = ir_measures.parse_measure(name)
    except (NameError, ValueError):
        raise SpecError("measures", name, legal) from None
    if measure.params.get("cutoff", 1) < 1:  # of which trec_eval ends the process
        raise SpecError("measures", name, legal)
    return measure


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


def write_run(uri: str, run: Run | Iterable[tuple[str, Mapping[str, float]]], tag: str) -> None:
    """Writes lines `query Q0 document rank score tag`, whole or not at all.

    A run that is too long for memory can come as pairs of a query id and its scores. White space
    in ids, which the format cannot express, is written as %20 and the like; `read_run` takes it
    back.
    """
    with writing_atomic(uri) as file:
        for query_id, scores in run.items() if isinstance(run, Mapping) else run:
            # Stable: equal scores stay in their order.
            ranked = sorted(scores.items(), key=lambda entry: -entry[1])
            for rank, (document_id, score) in enumerate(ranked, start=1):
                ids = f"{_word(query_id)} Q0 {_word(document_id)}"
                file.write(f"{ids} {rank} {score:.9g} {tag}\n")


def _word(name: str) -> str:
    """An id as one word; a % that would be taken for the code of white space is coded too.

    >>> _word("my file.txt"), _word("50%"), _word("a%20b")
    ('my%20file.txt', '50%', 'a%2520b')
    """
    return re.sub(r"\s|%(?=25|20|0[9A-D])", lambda match: quote(match[0]), name)


def _unword(word: str) -> str:
    return re.sub(r"%(25|20|0[9A-D])", lambda match: unquote(match[0]), word)


def read_run(uri: str) -> dict[str, dict[str, float]]:
    """Reads what `write_run` or another system wrote.

    Raises:
        SpecError: no such file, or a line that does not have TREC's six columns.
    """
    run: dict[str, dict[str, float]] = {}
    for number, line in lines_of(uri, "run"):
        try:
            query_id, _, document_id, _, score, _ = line.split()
            run.setdefault(_unword(query_id), {})[_unword(document_id)] = float(score)
        except ValueError:
            legal = "query Q0 document rank score tag"
            raise SpecError("run", line[:80], legal, f"stands in line {number} of {uri}") from None
    return run
