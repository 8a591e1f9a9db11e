"""Sentences for a report, which summarise the results and explain samples and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.eval.moments import moment_measure
from pipeline.eval.results import BM25, FULL, QUALITY_THRESHOLD, Evaluation, Result, RowComparison
from pipeline.runtime.text import p_equals, percentage


def summary(evaluation: Evaluation) -> Iterator[str]:
    """Yields sentences that summarise the results table."""
    measure, results = evaluation.headline, evaluation.results
    best = evaluation.best(results)
    assert best is not None, "an evaluation has at least one row"
    highest = evaluation.quality(best)
    names = [result.name for result in results if evaluation.quality(result) == highest]
    yield f"Best quality: {', '.join(names)}, {measure} {highest:.4f}."

    full = evaluation.best([result for result in results if result.method == FULL])
    cheapest = evaluation.cheapest(results)
    if cheapest is not None and full is not None and evaluation.quality(full) > 0:
        retention = percentage(evaluation.quality(cheapest) / evaluation.quality(full))
        parts = [
            f"{getattr(cheapest, size):,.0f} of {getattr(full, size):,.0f} {unit} per item"
            f" ({percentage(getattr(cheapest, size) / max(1.0, getattr(full, size)))})"
            for size, unit in (("vector_bytes", "vector bytes"), ("all_bytes", "stored bytes"))
        ]
        yield (
            f"Smallest row with at least {100 * QUALITY_THRESHOLD:.0f} % of the uncompressed "
            f"quality ({full.name}, {evaluation.quality(full):.4f}): {cheapest.name}, "
            f"{evaluation.quality(cheapest):.4f} ({retention}) with {' and '.join(parts)}."
        )
    yield from _bm25_sentence(evaluation)
    for sample, names in fitting_samples(
        [r for r in results if r.fit_sample.get("num_evaluated", 0) != 0]
    ).items():
        yield f"Fitted on {sample}: {', '.join(names)}."


def _bm25_sentence(evaluation: Evaluation) -> Iterator[str]:
    bm25 = next((result for result in evaluation.results if result.method == BM25), None)
    if bm25 is None:
        return
    better, worse, undecided = [], [], []
    for result, comparison in zip(evaluation.results, evaluation.row_comparisons, strict=True):
        if result is bm25:
            continue
        if not comparison.differs_from_bm25:
            undecided.append(result)
        elif comparison.below_bm25:
            worse.append(f"{result.name} ({p_equals(comparison.p_bm25)})")
        else:
            better.append(result)
    parts = [f"{len(better)} significantly better"] * bool(better)
    parts += [f"{len(undecided)} not significantly different"] * bool(undecided)
    parts += [f"{len(worse)} significantly worse: {', '.join(worse)}"] * bool(worse)
    number = len(evaluation.results) - 1
    others = f" The other {number} row{'s' * (number > 1)} compared with it: {', '.join(parts)}."
    yield f"BM25 reaches {evaluation.quality(bm25):.4f}." + (others if parts else "")


def against_bm25(comparison: RowComparison) -> str:
    """Describes how a row compares with BM25, or returns an empty text if it is not below."""
    if not comparison.below_bm25:
        return ""
    is_significant = comparison.loses_to_bm25
    verdict = "significantly below BM25" if is_significant else "below BM25, not significantly"
    return f"{verdict} ({p_equals(comparison.p_bm25)})"


def fitting(result: Result) -> str:
    """Describes the sample on which a row was fitted, if it was fitted."""
    fit_sample = result.fit_sample
    if not fit_sample:
        return ""
    number, evaluated = fit_sample["num_items"], fit_sample["num_evaluated"]
    items = f"{number:,} item{'s' * (number != 1)}"
    overlap = "all" if evaluated == number else f"{evaluated:,}" if evaluated else "none"
    origin = fit_sample["origin"]
    if not origin:
        return f"{items} of the index, {overlap} of them evaluated"
    source = origin.get("source", origin)
    location = source.get("path") or source.get("index") or "the index"
    where = f" where {source['filter']}" if source.get("filter") else ""
    return f"{items} of a separate sample ({location}{where}), {overlap} of them evaluated"


def fitting_samples(results: Sequence[Result]) -> dict[str, list[str]]:
    """Groups the fitted representations by the description of their sample."""
    found: dict[str, list[str]] = {}
    for result in results:
        names = found.setdefault(fitting(result), [])
        if result.representation not in names:
            names.append(result.representation)
    found.pop("", None)
    return found


def measure_description(measure: str) -> str:
    """Returns the description of a metric, or empty for an unknown one.

    >>> measure_description("P@5"), measure_description("Bpref")
    ('fraction of the first 5 results that are relevant', '')
    """
    if moment := moment_measure(measure):
        return moment.description
    name, _, cutoff = measure.partition("@")
    name, _, settings = name.partition("(")
    results = f"the first {cutoff} results" if cutoff else "the results"
    gain = "2^grade - 1" if "exp-log2" in settings else "the grade"
    descriptions = {
        "nDCG": f"gain of the relevant documents in {results}, discounted by log2(rank + 1) and"
        f" divided by the best possible value; the gain is {gain}",
        "R": f"fraction of the relevant documents that are in {results}",
        "RR": f"1 / rank of the first relevant document in {results}; 0 without one",
        "AP": f"mean precision at the ranks of the relevant documents in {results}",
        "P": f"fraction of {results} that are relevant",
        "Success": f"1 if a relevant document is in {results}, else 0",
    }
    return descriptions.get(name, "")
