"""What the figures of an evaluation show, as numbers: lines, scans over layers, correlations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import pearsonr

from pipeline.eval.results import FULL, OSR, Budget, Evaluation, Result
from pipeline.index.columns import codec_name

#: The measure of SAP's figures, where it was measured.
SAPS_MEASURE = "nDCG@5"


def codecs_of(evaluation: Evaluation) -> list[str]:
    """The codecs by which multi-vector rows are stored."""
    return sorted({codec_name(r.codec) for r in evaluation.results if r.compressor})


def line_name(evaluation: Evaluation, result: Result) -> str:
    """What a row's line is called: its method, and its encoder where there are several."""
    encoders = {r.encoder for r in evaluation.results if r.encoder}
    return result.method if len(encoders) < 2 else f"{result.method}, {result.encoder[:6]}"


def late_rows(evaluation: Evaluation) -> list[Result]:
    """The compressed rows under the late score."""
    return [r for r in evaluation.results if r.is_compressed and r.score == "late"]


def full_row(evaluation: Evaluation, result: Result) -> Result | None:
    """The full tokens of a row's encoder under the late score."""
    same = [r for r in evaluation.results if r.method == FULL and r.score == "late"]
    same = [r for r in same if r.encoder == result.encoder]
    return max(same, key=lambda r: r.vector_bytes, default=None)


@dataclass(frozen=True)
class Scan:
    """Rows that differ in their one layer alone.

    Attributes:
        name: the method with its other settings.
        rows: by layer, ascending.
    """

    name: str
    budget: Budget
    encoder: str
    rows: dict[int, Result]


def layer_scans(evaluation: Evaluation, score: str = "late") -> list[Scan]:
    """Every method at every budget that was measured at two or more single layers.

    Of those that are counted from the front: what a layer counted from the end is called there, the
    rows do not tell.
    """
    found: dict[tuple[str, Budget, str], dict[int, Result]] = {}
    for result in evaluation.results:
        layers = result.compressor.get("layers")
        if not isinstance(layers, list) or len(layers) != 1:
            continue
        if layers[0] >= 0 and result.score == score:
            name = re.sub(r" layers=\[-?\d+\]", "", line_name(evaluation, result))
            found.setdefault((name, result.budget, result.encoder), {})[layers[0]] = result
    return [Scan(*key, dict(sorted(rows.items()))) for key, rows in found.items() if len(rows) > 1]


def in_scans(evaluation: Evaluation) -> set[str]:
    """The names of the rows that stand in a scan, under any score."""
    scores = {result.score for result in evaluation.results}
    scans = [scan for score in scores for scan in layer_scans(evaluation, score)]
    return {result.name for scan in scans for result in scan.rows.values()}


@dataclass(frozen=True)
class DepthScan:
    """Rows of one reranker and first stage that differ only in the rerank depth.

    Attributes:
        name: of both, with the precision, and whether the first stage's score is added.
        first: its row.
        rows: Rows by rerank depth, ascending.
    """

    name: str
    first: Result
    rows: dict[int, Result]


def depth_scans(evaluation: Evaluation) -> list[DepthScan]:
    """Returns a scan per reranker that was measured at two or more rerank depths."""
    found: dict[tuple[str, str, str, bool], dict[int, Result]] = {}
    for row in evaluation.results:
        if how := row.rerank:
            precision = how["precision"] or ""
            key = (row.first_stage, how["model"], precision, how["add_first_stage"])
            found.setdefault(key, {})[how["pool"]] = row
    rows = {row.name: row for row in evaluation.results}
    several = len({model for _, model, _, _ in found}) > 1
    scans = []
    for (first, model, precision, added), own in found.items():
        if len(own) > 1:
            words = ["EDJE", model * several, precision, f"after {first}"]
            name = " ".join(filter(None, words)) + ", scores added" * added
            scans.append(DepthScan(name, rows[first], dict(sorted(own.items()))))
    return scans


def common_budget(evaluation: Evaluation) -> Budget | None:
    """The budget that most methods have under the late score, the smallest of equals."""
    methods: dict[Budget, set[str]] = {}
    scanned = in_scans(evaluation)
    for result in late_rows(evaluation):
        if any(result.budget) and result.name not in scanned:
            methods.setdefault(result.budget, set()).add(line_name(evaluation, result))
    return max(
        methods,
        key=lambda b: (
            len(methods[b]),
            b.num_vectors is not None,
            -(b.num_vectors or b.ratio or 0),
        ),
        default=None,
    )


def side_by_side(evaluation: Evaluation) -> list[Result]:
    """The diagnosed rows of full tokens, and of each method at the common budget."""
    budget, scanned = common_budget(evaluation), in_scans(evaluation)
    rows = [
        result
        for result in evaluation.results
        if result.diagnosis
        and (result.method == FULL or (result.is_compressed and result.budget == budget))
        and result.name not in scanned
    ]
    return [result for result in rows if result.diagnosis and result.diagnosis.strengths]


class Retained(NamedTuple):
    """A point of the retention figure: what a method keeps of the vectors and of the quality."""

    share: float
    quality: float
    spread: float


def retention_lines(evaluation: Evaluation) -> dict[str, list[Retained]]:
    """Quality as a share of the full tokens' against the share of vectors kept, by method.

    Of rows whose budget is a ratio. The share is that of the vectors really stored: methods that
    adapt to an item need not keep what they aim at.
    """
    measure = retention_measure(evaluation)
    scanned = in_scans(evaluation)
    lines: dict[str, list[Retained]] = {}
    for result in late_rows(evaluation):
        full = full_row(evaluation, result)
        if result.budget.ratio is None or result.name in scanned or full is None:
            continue
        whole = full.means[measure]
        if whole and full.vectors_per_item:
            share = result.vectors_per_item / full.vectors_per_item
            spread = (result.spread(measure) or 0.0) / whole
            point = Retained(share, result.means[measure] / whole, spread)
            lines.setdefault(line_name(evaluation, result), []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def retention_measure(evaluation: Evaluation) -> str:
    """The measure of the retention figure."""
    return SAPS_MEASURE if SAPS_MEASURE in evaluation.measures else evaluation.headline


class Correlation(NamedTuple):
    """A number of each row against its quality.

    Attributes:
        of: what was held against the quality.
        rows: the rows that have both.
        x: (n,) the number.
        y: (n,) the headline measure.
        r: Pearson's; None of fewer than three rows, or if either side does not vary.
        p: its two-sided p value.
    """

    of: str
    rows: list[Result]
    x: np.ndarray
    y: np.ndarray
    r: float | None
    p: float | None


def correlations(evaluation: Evaluation) -> Iterator[Correlation]:
    """OSR against quality over all compressed rows (SAP, section 4.6), and evenness (AGC, Table 8).

    AGC holds 1/CV and 1/Gini against quality among indexes of one budget; here that is the common
    one. CV counts as a plain number, not in percent.
    """
    rows = late_rows(evaluation)
    retained = [(row, row.retention.mean) for row in rows if row.retention]
    if retained:
        yield _correlation(evaluation, OSR, retained)
    budget = common_budget(evaluation)
    scanned = in_scans(evaluation)
    same = [
        r
        for r in rows
        if r.budget == budget and r.name not in scanned and r.diagnosis and r.diagnosis.gini
    ]
    if same:
        at = f"at {budget}"
        gini = [(r, 1 / r.diagnosis.gini) for r in same if r.diagnosis and r.diagnosis.gini]
        yield _correlation(evaluation, f"1/Gini {at}", gini)
        cv = [(r, 100 / r.diagnosis.cv) for r in same if r.diagnosis and r.diagnosis.cv]
        yield _correlation(evaluation, f"1/CV {at}", cv)


def _correlation(
    evaluation: Evaluation, of: str, numbers: Sequence[tuple[Result, float]]
) -> Correlation:
    rows = [row for row, _ in numbers]
    x = np.array([number for _, number in numbers])
    y = np.array([evaluation.quality(row) for row in rows])
    r = p = None
    if len(rows) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0:
        r, p = map(float, pearsonr(x, y))
    return Correlation(of, rows, x, y, r, p)
