"""Sentences of a report: the summary, comparisons with BM25, fitting samples, measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.eval.results import BM25, FULL, KEPT, Evaluation, Result, Standing
from pipeline.report.text import p_equals, share


def summary(evaluation: Evaluation) -> Iterator[str]:
    """Yields sentences that summarise the table."""
    measure, results = evaluation.headline, evaluation.results
    best = evaluation.best(results)
    assert best is not None, "an evaluation has at least one row"
    highest = evaluation.quality(best)
    tied = [result.name for result in results if evaluation.quality(result) == highest]
    yield f"Best quality: {', '.join(tied)}, {measure} {highest:.4f}."

    full = evaluation.best([result for result in results if result.method == FULL])
    frugal = evaluation.frugal(results)
    if frugal is not None and full is not None and evaluation.quality(full) > 0:
        kept = share(evaluation.quality(frugal) / evaluation.quality(full))
        parts = [
            f"{getattr(frugal, size):,.0f} of {getattr(full, size):,.0f} bytes per item"
            f" ({share(getattr(frugal, size) / max(1.0, getattr(full, size)))}) {of}"
            for size, of in (("vector_bytes", "of vectors"), ("all_bytes", "of everything stored"))
        ]
        yield (
            f"Cheapest with at least {100 * KEPT:.0f} % of the quality of the full tokens "
            f"({full.name}, {evaluation.quality(full):.4f}): {frugal.name}, "
            f"{evaluation.quality(frugal):.4f} ({kept}) with {' and '.join(parts)}."
        )
    yield from _bm25_sentence(evaluation)
    for on, names in fittings([r for r in results if r.fitted.get("evaluated", 0) != 0]).items():
        yield f"Fitted on {on}: {', '.join(names)}."


def _bm25_sentence(evaluation: Evaluation) -> Iterator[str]:
    """Counts rows significantly better or worse than BM25, and names the worse."""
    bm25 = next((result for result in evaluation.results if result.method == BM25), None)
    if bm25 is None:
        return
    better, worse, open_ = [], [], []
    for result, standing in zip(evaluation.results, evaluation.standings, strict=True):
        if result is bm25:
            continue
        if not standing.differs_from_bm25:
            open_.append(result)
        elif standing.below_bm25:
            worse.append(f"{result.name} ({p_equals(standing.p_bm25)})")
        else:
            better.append(result)
    parts = [f"{len(better)} significantly better"] * bool(better)
    parts += [f"{len(open_)} not significantly different"] * bool(open_)
    parts += [f"{len(worse)} significantly worse: {', '.join(worse)}"] * bool(worse)
    number = len(evaluation.results) - 1
    others = f" The other {number} row{'s' * (number > 1)} against it: {', '.join(parts)}."
    yield f"BM25 reaches {evaluation.quality(bm25):.4f}." + (others if parts else "")


def against_bm25(standing: Standing) -> str:
    """Returns how a row below BM25 compares with it; empty for other rows."""
    if not standing.below_bm25:
        return ""
    verdict = "loses to BM25" if standing.loses_to_bm25 else "below BM25, not significantly"
    return f"{verdict} ({p_equals(standing.p_bm25)})"


def fitting(result: Result) -> str:
    """Describes the sample that a row was fitted on; empty if nothing was fitted."""
    fitted = result.fitted
    if not fitted:
        return ""
    if fitted["num_items"] is None:
        return "items of the index; which ones was not recorded"
    number, evaluated = fitted["num_items"], fitted["evaluated"]
    items = f"{number:,} item{'s' * (number != 1)}"
    those = "all" if evaluated == number else f"{evaluated:,}" if evaluated else "none"
    origin = fitted["origin"]
    if not origin:
        return f"{items} of the index, {those} of them evaluated"
    source = origin.get("source", origin)
    place = source.get("path") or source.get("index") or "the index"
    where = f" where {source['where']}" if source.get("where") else ""
    return f"{items} of a separate sample ({place}{where}), {those} of them evaluated"


def fittings(results: Sequence[Result]) -> dict[str, list[str]]:
    """Returns the fitted representations by the description of their sample."""
    found: dict[str, list[str]] = {}
    for result in results:
        names = found.setdefault(fitting(result), [])
        if result.representation not in names:
            names.append(result.representation)
    found.pop("", None)
    return found


def explained(measure: str) -> str:
    """Returns the explanation of a measure; empty for an unknown one.

    >>> explained("RR@10"), explained("P@5"), explained("Bpref")
    ('1 / rank of the first relevant document of the first 10 results; 0 without one', \
'share of the first 5 results that are relevant', '')
    """
    name, _, cutoff = measure.partition("@")
    name, _, settings = name.partition("(")
    results = f"the first {cutoff} results" if cutoff else "the results"
    gain = "of a grade g it is 2^g - 1" if "exp-log2" in settings else "a grade is its gain"
    sentences = {
        "nDCG": f"gain of the relevant documents among {results}, discounted by log2(rank + 1), as"
        f" a share of the best possible; {gain}",
        "R": f"share of the relevant documents that are among {results}",
        "RR": f"1 / rank of the first relevant document of {results}; 0 without one",
        "AP": f"mean precision at the ranks of the relevant documents of {results}",
        "P": f"share of {results} that are relevant",
        "Success": f"1 if a relevant document is among {results}, else 0",
    }
    return sentences.get(name, "")
