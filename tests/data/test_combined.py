"""Sources combined in one spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import SpecError, dump, parse
from pipeline.index.job import IndexSpec
from pipeline.registry import SOURCES
from pipeline.schema import Item
from tests.pdfs import Page, pdf


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("letters", "papers"):
        (tmp_path / name).mkdir()
    (tmp_path / "letters/a.txt").write_text("Dear Ada")
    (tmp_path / "papers/a.pdf").write_bytes(pdf(Page([(10, 50, "one")]), Page([(10, 50, "two")])))
    return tmp_path


def spec_of(folder: Path, **fields) -> IndexSpec:
    source = [
        {"name": "text", "path": str(folder / "letters")},
        {"name": "pages", "path": str(folder / "papers"), **fields},
    ]
    given = {"index": "x", "source": source, "representations": [{"compressor": "none"}]}
    return parse(IndexSpec, given)


def test_sources_are_read_in_order(folders):
    source = SOURCES.build(spec_of(folders).source)
    source.check()
    results = []
    for shard in source.shards():
        listed = list(enumerate(source.scan(shard)))
        assert all(isinstance(entry, Item) for _, entry in listed)
        results += list(source.decode(shard, listed))
    ids = [(item.source, item.item_id, item.text) for item in results]
    assert ids == [
        ("letters", "a.txt", "Dear Ada"),
        ("papers", "a.pdf#page=1", "one"),
        ("papers", "a.pdf#page=2", "two"),
    ]
    assert source.collections == ("letters", "papers")
    assert set(source.payload.names) == {"word_spans", "word_boxes"}


def test_spec_round_trip(folders):
    spec = spec_of(folders)
    assert parse(IndexSpec, dump(spec)) == spec


def test_rejects_duplicate_collections(folders):
    with pytest.raises(
        SpecError,
        match=r"^source\[1\].collection must be unique for each source, got 'letters', which occurs"
        r" twice, first in source\[0\]; set `collection` of one of them$",
    ):
        spec_of(folders, collection="letters")


def test_rejects_empty_list(folders):
    with pytest.raises(SpecError, match="source"):
        parse(IndexSpec, {"index": "x", "source": []})


def test_error_names_position_of_source(folders):
    (folders / "papers/a.pdf").unlink()
    with pytest.raises(SpecError, match=r"^\[1\]\.path must be .*contains no such files"):
        SOURCES.build(spec_of(folders).source).check()
