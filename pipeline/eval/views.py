"""Data of the figures in a report, such as lines, scans over layers, and correlations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import pearsonr

from pipeline.config import digest
from pipeline.eval.results import FULL, OSR, Budget, Evaluation, Result
from pipeline.index.columns import codec_name

#: Metric of SAP's figures, used if it was measured.
SAP_MEASURE = "nDCG@5"


def codec_names(evaluation: Evaluation) -> list[str]:
    """Returns the codecs of the multi-vector rows."""
    return sorted({codec_name(r.codec) for r in evaluation.results if r.compressor})


def line_name(evaluation: Evaluation, result: Result) -> str:
    """Returns the label of a row's line: its method and, with several encoders, the encoder."""
    encoders = {r.encoder for r in evaluation.results if r.encoder}
    label = evaluation.spec.get("labels", {}).get(result.method, result.method)
    return label if len(encoders) < 2 else f"{label}, {result.encoder[:6]}"


def maxsim_rows(evaluation: Evaluation) -> list[Result]:
    """Returns the compressed rows under the MaxSim score."""
    return [r for r in evaluation.results if r.is_compressed and r.score == "maxsim"]


def full_row(evaluation: Evaluation, result: Result) -> Result | None:
    """Returns the uncompressed row of the same encoder under the MaxSim score."""
    candidates = [r for r in evaluation.results if r.method == FULL and r.score == "maxsim"]
    candidates = [r for r in candidates if r.encoder == result.encoder]
    return max(candidates, key=lambda r: r.vector_bytes, default=None)


@dataclass(frozen=True)
class Scan:
    """Rows that differ only in the single layer that they read."""

    name: str
    budget: Budget
    encoder: str
    rows: dict[int, Result]


def layer_scans(evaluation: Evaluation, score: str = "maxsim") -> list[Scan]:
    """Returns a scan for each method and budget that was measured at two or more single layers.

    Layers that are counted from the end are ignored, because the results do not contain the number
    of layers.
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


def scanned_rows(evaluation: Evaluation) -> set[str]:
    """Returns the names of all rows that are part of a layer scan, regardless of their score."""
    scores = {result.score for result in evaluation.results}
    scans = [scan for score in scores for scan in layer_scans(evaluation, score)]
    return {result.name for scan in scans for result in scan.rows.values()}


@dataclass(frozen=True)
class DepthScan:
    """Rows of one reranker and first stage that differ only in the rerank depth."""

    name: str
    first_stage: Result
    rows: dict[int, Result]


def depth_scans(evaluation: Evaluation) -> list[DepthScan]:
    """Returns a scan for each reranker that was measured at two or more rerank depths."""
    found: dict[str, dict[int, Result]] = {}
    models = set()
    for row in evaluation.results:
        if row.rerank:
            first, *others = row.rerank["rerankers"]
            fields = {**first, "top": None, "label": ""}
            found.setdefault(digest([row.first_stage, fields, others]), {})[first["top"]] = row
            models.add((row.method, first.get("model")))
    rows = {row.name: row for row in evaluation.results}
    scans = []
    for by_depth in found.values():
        if len(by_depth) > 1:
            row = next(iter(by_depth.values()))
            spec = row.rerank["rerankers"][0]
            model = spec.get("model") or "" if len(models) > 1 else ""
            words = [row.method.upper(), model, spec.get("precision"), f"after {row.first_stage}"]
            name = " ".join(filter(None, words)) + ", scores added" * spec["add_first_stage"]
            scans.append(DepthScan(name, rows[row.first_stage], dict(sorted(by_depth.items()))))
    return scans


@dataclass(frozen=True)
class CandidatesScan:
    """Rows of one candidate generator and representation.

    Attributes:
        generator: Candidate generator, such as `ivf+bm25`.
    """

    generator: str
    exact: Result
    rows: dict[int, Result]

    @property
    def name(self) -> str:
        """Name of the generator and the representation."""
        return f"{self.generator} of {self.exact.name}"


def candidates_scans(evaluation: Evaluation) -> list[CandidatesScan]:
    """Returns a scan for each candidate generator and representation."""
    found: dict[tuple[str, str], dict[int, Result]] = {}
    for row in evaluation.results:
        if settings := row.candidates:
            by_number = found.setdefault((row.first_stage, settings["generator"]), {})
            by_number[settings["num_candidates"]] = row
    return [
        CandidatesScan(generator, evaluation.row(exact), dict(sorted(rows.items())))
        for (exact, generator), rows in found.items()
    ]


def common_budget(evaluation: Evaluation) -> Budget | None:
    """Returns the budget with the most methods under the MaxSim score. Ties go to the smallest."""
    methods: dict[Budget, set[str]] = {}
    scanned = scanned_rows(evaluation)
    for result in maxsim_rows(evaluation):
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


def comparable_rows(evaluation: Evaluation) -> list[Result]:
    """Returns the diagnosed uncompressed rows, and a row at the common budget for each method."""
    budget, scanned = common_budget(evaluation), scanned_rows(evaluation)
    rows = [
        result
        for result in evaluation.results
        if result.diagnosis
        and (result.method == FULL or (result.is_compressed and result.budget == budget))
        and result.name not in scanned
    ]
    return [result for result in rows if result.diagnosis and result.diagnosis.strengths]


class RetentionPoint(NamedTuple):
    """Point of the retention figure.

    Attributes:
        share: Fraction of the uncompressed vectors that is stored.
        quality: Fraction of the uncompressed quality.
        spread: Standard deviation of `quality` over seeds.
    """

    share: float
    quality: float
    spread: float


def retention_lines(evaluation: Evaluation) -> dict[str, list[RetentionPoint]]:
    """Returns quality and fraction of stored vectors by method, relative to uncompressed rows.

    Only rows whose budget is a ratio are included. The fraction is measured rather than taken from
    the spec, because adaptive methods may deviate from their target.
    """
    measure = retention_measure(evaluation)
    scanned = scanned_rows(evaluation)
    lines: dict[str, list[RetentionPoint]] = {}
    for result in maxsim_rows(evaluation):
        full = full_row(evaluation, result)
        if result.budget.ratio is None or result.name in scanned or full is None:
            continue
        whole = full.means[measure]
        if whole and full.vectors_per_item:
            share = result.vectors_per_item / full.vectors_per_item
            spread = (result.spread(measure) or 0.0) / whole
            point = RetentionPoint(share, result.means[measure] / whole, spread)
            lines.setdefault(line_name(evaluation, result), []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def retention_measure(evaluation: Evaluation) -> str:
    """Returns the metric of the retention figure."""
    return SAP_MEASURE if SAP_MEASURE in evaluation.measures else evaluation.headline


class Correlation(NamedTuple):
    """Correlation between a quantity and the quality of rows.

    Attributes:
        x: Quantity (n,).
        y: Headline metric (n,).
        r: Pearson's r; None with fewer than three rows, or if either value is constant.
    """

    quantity: str
    rows: list[Result]
    x: np.ndarray
    y: np.ndarray
    r: float | None
    p: float | None


def correlations(evaluation: Evaluation) -> Iterator[Correlation]:
    """Yields correlations with quality: of OSR (SAP, section 4.6) and of evenness (AGC, Table 8).

    OSR is correlated over all compressed rows. AGC correlates 1/CV and 1/Gini among indexes of one
    budget, which is the common one here. CV is a fraction, not in percent.
    """
    rows = maxsim_rows(evaluation)
    retentions = [(row, row.retention.mean) for row in rows if row.retention]
    if retentions:
        yield _correlation(evaluation, OSR, retentions)
    budget = common_budget(evaluation)
    scanned = scanned_rows(evaluation)
    same_budget = [
        r
        for r in rows
        if r.budget == budget and r.name not in scanned and r.diagnosis and r.diagnosis.gini
    ]
    if same_budget:
        at = f"at {budget}"
        gini = [(r, 1 / r.diagnosis.gini) for r in same_budget if r.diagnosis and r.diagnosis.gini]
        yield _correlation(evaluation, f"1/Gini {at}", gini)
        cv = [(r, 100 / r.diagnosis.cv) for r in same_budget if r.diagnosis and r.diagnosis.cv]
        yield _correlation(evaluation, f"1/CV {at}", cv)


def _correlation(
    evaluation: Evaluation, quantity: str, values: Sequence[tuple[Result, float]]
) -> Correlation:
    rows = [row for row, _ in values]
    x = np.array([value for _, value in values])
    y = np.array([evaluation.quality(row) for row in rows])
    r = p = None
    if len(rows) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0:
        r, p = map(float, pearsonr(x, y))
    return Correlation(quantity, rows, x, y, r, p)
