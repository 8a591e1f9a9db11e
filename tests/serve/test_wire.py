"""Limits of requests."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.config import SpecError
from pipeline.serve.wire import MAX_LENGTHS, MAXIMA, SearchRequest


def test_searches_at_the_limits_are_valid():
    texts = {"representation": "r" * 256, "filter": "f" * 10_000}
    request = SearchRequest(query="q", k=10_000, ids=["a"] * 100_000, **texts)
    assert len(request.ids or ()) == MAX_LENGTHS["ids"]


@pytest.mark.parametrize("field", [*MAXIMA, *MAX_LENGTHS])
def test_searches_beyond_a_limit_are_rejected(field):
    if field in MAXIMA:
        value, shown = MAXIMA[field] + 1, MAXIMA[field]
    else:
        shown = MAX_LENGTHS[field]
        value = ["a"] * (shown + 1) if field in ("ids", "parents") else "a" * (shown + 1)
    with pytest.raises((SpecError, ValidationError), match=f"{field}.*at most {shown:,}"):
        SearchRequest(query="q", **{field: value})
