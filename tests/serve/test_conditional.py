"""Tests of conditional requests and of ranges."""

from __future__ import annotations

import pytest
from fastapi import Request

from pipeline.search.previews import ByteRange
from pipeline.serve.conditional import entity_tag, is_current, requested_range


def request(**headers: str) -> Request:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "headers": pairs})


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-", ByteRange(0, None)),
        ("bytes=3-7", ByteRange(3, 8)),
        ("bytes=-5", ByteRange(None, 5)),
        ("BYTES=1-1", ByteRange(1, 2)),
        ("bytes=7-3", None),
        ("bytes=-", None),
        ("bytes=0-1,4-5", None),
        ("items=0-1", None),
        ("bytes=" + "9" * 30 + "-", None),
        ("", None),
    ],
)
def test_range(header, expected):
    assert requested_range(request(range=header)) == expected


def test_entity_tags():
    tag = entity_tag("a", 1)
    assert is_current(request(if_none_match=f'"other", W/{tag}'), tag)
    assert is_current(request(if_none_match="*"), tag)
    assert not is_current(request(if_none_match='"other"'), tag)
    assert not is_current(request(), tag)
