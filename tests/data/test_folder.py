"""Types of files by their content, and the entries of a folder."""

from __future__ import annotations

import pytest

from pipeline.config import SpecError
from pipeline.data.folder import detect
from pipeline.registry import SOURCES
from pipeline.schema import Reject
from tests import mixed


@pytest.mark.parametrize(
    ("head", "suffix", "named", "kind"),
    [
        (b"%PDF-1.4", ".txt", "text", "PDF"),
        (b"A text about %PDF-1.4", ".txt", "text", "text"),
        (b"\0\0\0\x18ftypM4A ", ".bin", "other", "audio"),
        (b"\0\0\0\x18ftypisom", ".mp4", "video", "video"),
        (b"\0\0\0\x18ftypheic", ".heic", "other", "other"),
        (b"RIFF\0\0\0\0WAVE", ".x", "other", "audio"),
        (b"RIFF\0\0\0\0WEBP", ".x", "other", "image"),
        (b"\x1aE\xdf\xa3", ".mka", "other", "video"),
        (b"BM\0\0\0\0\0\0\0\0", ".x", "other", "image"),
        (b"OggS" + bytes(24) + b"\x80theora", ".ogg", "audio", "video"),
        (b"\xff\xfeh\0i\0", ".txt", "text", "text"),
        (b"\0\1\2", ".mp3", "audio", "audio"),  # its reader says what is wrong
        (b"\0\1\2", ".txt", "text", "other"),
        (b"<?xml version='1.0'?><rss>", ".rss", "other", "HTML"),
        (b'{"a": 1}', ".json", "other", "text"),
        (b'{"a": 1}', ".jsonl", "JSON lines", "JSON lines"),
        (b"a,b\n1,2", ".csv", "CSV", "CSV"),
        (b"From: a\nTo: b\nSubject: c\n\nbody", "", "other", "e-mail"),
        (b"Subject: an essay\n\nbody", "", "other", "text"),
        (b"{\\rtf1", ".rtf", "other", "other"),
    ],
)
def test_detection(head, suffix, named, kind):
    assert detect(head, suffix, lambda: b"", named) == kind


def test_kinds_that_the_encoder_does_not_read_are_rejected(tmp_path):
    mixed.write_media(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    source = SOURCES.build(SOURCES.resolve({"name": "folder", "path": str(tmp_path)}))
    source.check()
    entries = [entry for shard in source.shards() for entry in source.scan(shard)]
    rejects = {entry.item_id: entry.reason for entry in entries if isinstance(entry, Reject)}
    assert rejects == dict.fromkeys(
        ["clip.mp4", "photo.png", "tones.wav"], "not read by the encoder"
    )
    (tmp_path / "a.txt").unlink()
    with pytest.raises(SpecError, match=r"transcript .* \(pip install \"maxray\[ocr,asr\]\"\)"):
        source.check()


def test_rows_of_tables(tmp_path):
    (tmp_path / "header.csv").write_text("only,names\n")
    (tmp_path / "blank.csv").write_text("a;b\n;\n1;2;3\n\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "t", "title": "T", "n": 1}\nnot JSON\n')
    source = SOURCES.build(SOURCES.resolve({"name": "folder", "path": str(tmp_path)}))
    (shard,) = source.shards()
    entries = {entry.item_id: entry for entry in source.scan(shard)}
    texts = {name: getattr(entry, "text", "rejected") for name, entry in entries.items()}
    assert texts == {
        "bad.jsonl#row=1": "T\nt",
        "bad.jsonl#row=2": "rejected",
        "blank.csv#row=1": "a: 1\nb: 2\n3: 3",
        "header.csv#row=1": "only\tnames",
    }
    assert entries["bad.jsonl#row=1"].metadata == {"title": "T", "n": 1}


def test_tables_of_spreadsheet_programs(tmp_path):
    (tmp_path / "names.csv").write_text("a,a,\n1,2,3\n")
    (tmp_path / "separator.csv").write_text("sep=;\na;b\n1,5;2\n")
    (tmp_path / "utf16.tsv").write_text("a\tb\n1\té\n", encoding="utf-16")
    with open(tmp_path / "zeros.csv", "wb") as file:
        file.write(b"a,b\n1,2\n".ljust(5000, b"z"))
        file.truncate(1 << 30)
    source = SOURCES.build(SOURCES.resolve({"name": "folder", "path": str(tmp_path)}))
    entries = [entry for shard in source.shards() for entry in source.scan(shard)]
    found = {entry.item_id: getattr(entry, "text", None) for entry in entries}
    assert found == {
        "names.csv#row=1": "a 1: 1\na 2: 2\n3: 3",
        "separator.csv#row=1": "a: 1,5\nb: 2",
        "utf16.tsv#row=1": "a: 1\nb: é",
        "zeros.csv#row=1": "a: 1\nb: 2",
        "zeros.csv": None,  # the line of zeros is not read
    }
