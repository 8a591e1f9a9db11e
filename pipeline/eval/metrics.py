"""Retrieval metrics with the names of ir-measures, and runs in TREC format.

A run is a mapping `{query id: {document id: score}}`. Ties are ordered as in trec_eval. The metrics
are therefore equal to those that trec_eval computes from the file of the run.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote, unquote

import ir_measures
import numpy as np
from ir_measures.providers import FallbackProvider

from pipeline.config import SpecError
from pipeline.eval.moments import Moments, moment_measure
from pipeline.eval.topics import read_lines
from pipeline.runtime.atomic import open_atomic

Run = Mapping[str, Mapping[str, float]]
Grades = Mapping[str, int]

DEFAULT_MEASURES = ("nDCG@5", "nDCG@10", "R@5", "R@10", "R@100", "RR@10", "AP")

#: Providers of all metrics except nDCG. Excluded are gdeval (a Perl script that rounds), accuracy
#: (divides by zero if all hits are relevant) and pyndeval (needs subtopics).
PROVIDERS = FallbackProvider(
    [
        ir_measures.pytrec_eval,
        ir_measures.cwl_eval,
        ir_measures.msmarco,  # RR@k
        ir_measures.compat,
        ir_measures.judged,
    ]
)
NDCG = "nDCG"


#: Median rank of the first relevant document (MdR), which ir-measures does not have. It is not a
#: mean, and lower is better.
MDR = "MdR"


class _MedianRank(ir_measures.measures.Measure):
    """Median over the queries of the rank of the first relevant document."""

    NAME = __name__ = MDR


class _MomentMeasure(ir_measures.measures.Measure):
    """Metric of time ranges, see `pipeline.eval.moments`."""

    NAME = __name__ = "moment"


def parse_measure(name: str) -> ir_measures.Measure:
    """Returns the metric of a name.

    Raises:
        SpecError: The metric does not exist, or cannot be computed with these parameters.
    """
    if name == MDR:
        return _MedianRank()
    if moment := moment_measure(name):
        return _MomentMeasure(cutoff=moment.depth)
    rule = f"{MDR} or an ir-measures name such as {', '.join(DEFAULT_MEASURES)}"
    with contextlib.suppress(NameError, ValueError, TypeError, AssertionError):
        measure = ir_measures.parse_measure(name)
        measure.validate_params()
        is_supported = measure.NAME == NDCG or PROVIDERS.supports(_unfiltered(measure))
        # A cutoff below 1 terminates the process in trec_eval.
        if is_supported and measure.params.get("cutoff", 1) >= 1:
            return measure
    raise SpecError("measures", name, rule, "is not supported")


def _unfiltered(measure: ir_measures.Measure) -> ir_measures.Measure:
    """Returns a metric without `judged_only`, for which `per_query` filters the rankings."""
    return measure(judged_only=False) if "judged_only" in measure.params else measure


def per_query(
    run: Run,
    qrels: Mapping[str, Grades],
    measures: Sequence[str],
    moments: Moments | None = None,
) -> dict[str, dict[str, float]]:
    """Computes the metrics of each judged query as `{query id: {metric: value}}`.

    `moments` has the relevant time ranges for metrics such as R1@0.5.

    The metrics of a judged query are 0 if the run does not contain it. In MdR, a relevant document
    that was not found has the rank after the last rank of the longest ranking. Queries without
    judgments are ignored. Negative grades are treated as 0.

    >>> per_query({"q": {"a": 2.0, "b": 1.0}}, {"q": {"b": 1}, "r": {"c": 1}}, ["RR@10"])
    {'q': {'RR@10': 0.5}, 'r': {'RR@10': 0.0}}
    """
    graded = {
        query_id: {document_id: max(0, grade) for document_id, grade in grades.items()}
        for query_id, grades in qrels.items()
    }
    rankings = {query_id: ranking(run[query_id]) for query_id in qrels if run.get(query_id)}
    values = {query_id: dict.fromkeys(measures, 0.0) for query_id in qrels}
    for name in measures:
        if moment := moment_measure(name):
            assert moments is not None, f"{name} needs moments"
            for query_id, order in rankings.items():
                values[query_id][name] = moments.value(moment, query_id, order)
            continue
        measure, orders = parse_measure(name), rankings
        if measure.params.get("judged_only"):
            judged = ((q, [d for d in order if d in graded[q]]) for q, order in rankings.items())
            orders = {query_id: order for query_id, order in judged if order}
        measure = _unfiltered(measure)
        if name == MDR:
            found = _first_ranks(orders, graded)
        elif measure.NAME == NDCG:
            found = {q: _ndcg(order, graded[q], measure) for q, order in orders.items()}
        else:
            found = _provided(orders, graded, measure)
        for query_id, value in found.items():
            values[query_id][name] = value
    return values


def ranking(scores: Mapping[str, float]) -> list[str]:
    """Sorts the documents of a query by descending score. Ties are sorted by descending id.

    The order matches that of trec_eval, which stores scores in single precision. Scores that are
    equal in float32 are therefore ties.

    >>> ranking({"a": 1.0, "b": 1.0, "c": 2.0, "d": 1.0 + 1e-9})
    ['c', 'd', 'b', 'a']
    """
    with np.errstate(over="ignore"):
        single = np.array(list(scores.values()), np.float64).astype(np.float32)
    rounded = dict(zip(scores, single.tolist(), strict=True))
    return sorted(sorted(scores, reverse=True), key=lambda document_id: -rounded[document_id])


def _provided(
    rankings: Mapping[str, Sequence[str]],
    graded: dict[str, dict[str, int]],
    measure: ir_measures.Measure,
) -> dict[str, float]:
    """Computes a single metric with its provider.

    Metrics are computed by separate calls, because within one call, nDCG may use the gains of
    another metric, and equal metrics share a value. Scores are replaced by ranks so that providers
    do not have to break ties. pytrec_eval is slow for unusual grades or crashes. It therefore
    receives 1 for relevant documents and 0 for all others.
    """
    run = {
        query_id: {document_id: -float(rank) for rank, document_id in enumerate(order)}
        for query_id, order in rankings.items()
    }
    if ir_measures.pytrec_eval.supports(measure):
        level = 1
        if "rel" in measure.SUPPORTED_PARAMS and isinstance(measure["rel"], int):
            level, measure = measure["rel"], measure(rel=1)
        graded = {
            query_id: {document_id: int(grade >= level) for document_id, grade in grades.items()}
            for query_id, grades in graded.items()
        }
    found = PROVIDERS.iter_calc([measure], graded, run)
    return {metric.query_id: float(metric.value) for metric in found if metric.query_id in run}


def _ndcg(order: Sequence[str], grades: Grades, measure: ir_measures.Measure) -> float:
    """Computes nDCG from graded judgments. trec_eval takes minutes for a grade of 10^6.

    The gain of grade g is g, or `2^g - 1` if `dcg` is exp-log2 (SAP, equation 7). The discount of
    rank i, counted from 1, is `log2(i + 1)`. `gains` replaces grades by other grades.
    """
    replaced = measure.params.get("gains", {})
    grades = {document_id: replaced.get(grade, grade) for document_id, grade in grades.items()}
    is_exponential = measure["dcg"] == "exp-log2"
    top = max(grades.values(), default=0)

    def dcg(ranked: Iterable[int]) -> float:
        grades_K = np.array([max(0, grade) for grade in ranked], np.float64)
        # Divided by 2^top, which cancels, so that large grades do not overflow.
        gains_K = np.exp2(grades_K - top) - np.exp2(-float(top)) if is_exponential else grades_K
        return float(gains_K @ (1 / np.log2(np.arange(len(gains_K)) + 2)))

    cutoff = measure.params.get("cutoff")
    ideal = dcg(sorted(grades.values(), reverse=True)[:cutoff])
    return dcg(grades.get(document, 0) for document in order[:cutoff]) / (ideal or 1.0)


def _first_ranks(
    rankings: Mapping[str, Sequence[str]], graded: Mapping[str, Grades]
) -> dict[str, float]:
    last = max(map(len, rankings.values()), default=0)
    found = {}
    for query_id, grades in graded.items():
        order = rankings.get(query_id, ())
        ranks = (rank for rank, d in enumerate(order, start=1) if grades.get(d, 0) > 0)
        found[query_id] = float(next(ranks, last + 1))
    return found


def means(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the queries, and the median of MdR.

    >>> means({"q": {"RR@10": 0.5, "MdR": 2.0}, "r": {"RR@10": 0.0, "MdR": 5.0}})
    {'RR@10': 0.25, 'MdR': 3.5}
    """
    rows = list(values.values())
    return {
        name: statistics.median(row[name] for row in rows)
        if name == MDR
        else sum(row[name] for row in rows) / len(rows)
        for name in (rows[0] if rows else ())
    }


def write_run(uri: str, run: Run | Iterable[tuple[str, Mapping[str, float]]], tag: str) -> None:
    """Writes a run to a file atomically, as lines `query Q0 document rank score tag`.

    The format does not allow white space in ids. It is percent-encoded and decoded again by
    `read_run`.

    Args:
        uri: Path or URI of the file.
        run: Run, or pairs of a query id and its scores if the run does not fit in memory.
        tag: Name of the run.
    """
    with open_atomic(uri) as file:
        for query_id, scores in run.items() if isinstance(run, Mapping) else run:
            # The sort is stable: ties keep their order.
            ranked = sorted(scores.items(), key=lambda entry: -entry[1])
            for rank, (document_id, score) in enumerate(ranked, start=1):
                ids = f"{_escape(query_id)} Q0 {_escape(document_id)}"
                file.write(f"{ids} {rank} {score:.9g} {tag}\n")


#: Form of an empty id.
_EMPTY = "%empty"
#: Characters at which `str.split` divides a line, and the byte order mark that readers remove.
_ENCODED = [chr(code) for code in range(0xFFFF) if chr(code).isspace()] + ["\ufeff"]
_CODES = "|".join([*(quote(character)[1:] for character in _ENCODED), "25", _EMPTY[1:]])


def _escape(name: str) -> str:
    """Percent-encodes white space in an id. Existing % signs are encoded if they would be decoded.

    >>> _escape("my file.txt"), _escape("3\u202fPM"), _escape("50%"), _escape("a%20b")
    ('my%20file.txt', '3%E2%80%AFPM', '50%', 'a%2520b')
    """
    encoded = re.sub(rf"[\s\ufeff]|%(?={_CODES})", lambda match: quote(match[0]), name)
    return encoded or _EMPTY


def _unescape(word: str) -> str:
    """Inverts `_escape`. All other percent signs are left unchanged."""
    return re.sub(
        f"%(?:{_CODES})", lambda match: unquote(match[0]) if match[0] != _EMPTY else "", word
    )


def read_run(uri: str) -> dict[str, dict[str, float]]:
    """Reads a run in TREC format.

    Raises:
        SpecError: The file is missing, a line does not have the six columns, or a document occurs
            twice in the ranking of a query.
    """
    run: dict[str, dict[str, float]] = {}
    for number, line in read_lines(uri, "run"):
        note = f" (line {number} of {uri})"
        try:
            query_id, _, document_id, _, value, _ = line.split()
            if math.isnan(score := float(value)):
                raise ValueError
        except ValueError:
            rule = "a line `query Q0 document rank score tag`"
            raise SpecError("run", line[:80], rule, note=note) from None
        scores, document_id = run.setdefault(_unescape(query_id), {}), _unescape(document_id)
        if document_id in scores:
            rule = "the only line of its document"
            raise SpecError("run", line[:80], rule, "occurs twice", note)
        scores[document_id] = score
    return run
