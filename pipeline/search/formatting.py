"""Formatting of hits for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.search.explain import highlighted_spans, printable, snippet
from pipeline.search.results import Hit, Location, MemberHit, Passage, ScoreParts


def format_hits(hits: Sequence[Hit], delimiters: tuple[str, str]) -> str:
    """Formats each hit as a line with rank, score, id, span and title, followed by a snippet."""
    if not hits:
        return "no hits"
    lines = []
    is_mixed = len({hit.representation for hit in hits}) > 1  # scores are not comparable
    for hit in hits:
        head = [f"{hit.rank:3}  {hit.score:8.4f}", hit.item_id, format_span(hit.span)]
        head += [f"[{hit.representation}]"] if is_mixed else []
        head += [hit.title or "", format_first_rank(hit)]
        lines.append("  ".join(printable(part) for part in head if part))
        if parts := hit.parts and format_parts(hit.parts):
            lines.append(f"     {parts}")
        if hit.members:
            lines.append(f"     {', '.join(map(format_member, hit.members))}")
        spans = highlighted_spans(hit.passages[0]) if hit.passages else []
        if hit.text and (shown := snippet(hit.text, spans, delimiters=delimiters)):
            lines.append(f"     {shown}")
        if locations := "; ".join(filter(None, map(format_location, hit.passages or ()))):
            lines.append(f"     {locations}")
    return "\n".join(lines)


def format_parts(parts: ScoreParts) -> str:
    """Formats the components of a hybrid or fused score. Other scores yield an empty string.

    >>> format_parts(ScoreParts(maxsim=4.5, maxsim_mean=0.75, single_vector=0.5))
    'single-vector 0.5000, MaxSim 4.5000 (mean 0.7500)'
    >>> format_parts(ScoreParts(maxsim=4.5, maxsim_mean=0.75, bm25=3.25))
    'BM25 3.2500, MaxSim 4.5000 (mean 0.7500)'
    >>> format_parts(ScoreParts(maxsim=4.5, maxsim_mean=0.75))
    ''
    """
    others = {"BM25": parts.bm25, "single-vector": parts.single_vector}
    texts = [f"{name} {score:.4f}" for name, score in others.items() if score is not None]
    if parts.maxsim is None or not texts:
        return ""
    return ", ".join([*texts, f"MaxSim {parts.maxsim:.4f} (mean {parts.maxsim_mean:.4f})"])


def format_member(hit: MemberHit) -> str:
    """Formats the rank and the score of a hit in a member of a federation.

    >>> format_member(MemberHit(member="pages", rank=2, score=5.25, value=0.5, item_id="a"))
    'pages #2 (5.2500)'
    """
    return f"{hit.member} #{hit.rank} ({hit.score:.4f})"


def format_first_rank(hit: Hit) -> str:
    """Formats the rank of a hit before reranking, and the reason if the hit was skipped.

    >>> hit = {"rank": 1, "score": 1.5, "item_id": "a", "parent_id": "a"}
    >>> format_first_rank(Hit(**hit)), format_first_rank(
    ...     Hit(**hit, first_stage={"rank": 2, "score": 0.5}, rerank={"problem": "has no text"})
    ... )
    ('', '(was 2; has no text)')
    """
    if hit.first_stage is None:
        return ""
    problem = hit.rerank.problem if hit.rerank else None
    return f"(was {'; '.join(filter(None, [str(hit.first_stage.rank), problem]))})"


def format_span(span: dict[str, Any] | None) -> str:
    """Formats the range of a hit in its parent document.

    >>> format_span({"unit": "page", "start": 3.0, "end": 3.0}), format_span(None)
    ('(page 3)', '')
    """
    if not span or not span["unit"]:
        return ""
    start, end = (f"{span[side]:g}" for side in ("start", "end"))
    return f"({span['unit']} {start})" if start == end else f"({span['unit']} {start}-{end})"


def format_location(location: Location | Passage) -> str:
    """Formats the times, the region and the confidence of a match.

    >>> format_location(Location(span=(0, 4), box=(0.1, 0.25, 0.5, 0.3), times=(4.0, 6.0)))
    'video 4.0-6.0 s, box 0.10 0.25 0.50 0.30'
    >>> format_location(Location(span=(0, 4), times=(5.31, 7.0)))
    'audio 5.3-7.0 s'
    >>> format_location(Location(span=(0, 4), times=(5.31, 7.0), confidence=0.825))
    'audio 5.3-7.0 s, confidence 0.82'
    """
    parts = []
    if location.times:
        start, end = location.times
        parts.append(f"{'video' if location.box else 'audio'} {start:.1f}-{end:.1f} s")
    if location.box:
        parts.append("box " + " ".join(f"{side:.2f}" for side in location.box))
    if location.confidence is not None:
        parts.append(f"confidence {location.confidence:.2f}")
    return ", ".join(parts)
