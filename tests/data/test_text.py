"""The text source: listing, rejects, and passages."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import random
import re
from collections import Counter
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem

from pipeline.config import SpecError, parse
from pipeline.data import text as text_module
from pipeline.data.text import Passages, Text, count_newlines, read_lines, windows
from pipeline.schema import ITEM, REJECT, Item, Reject

CRANFIELD = Path(__file__).parents[2] / "jobs" / "data" / "cranfield"


def source(path: object, **options: object) -> Text:
    return Text(parse(Text.Spec, {"name": "text", "path": str(path), **options}))


def listed(text: Text) -> list[Item | Reject]:
    """Returns the results of listing a source, after pickling, JSON and Arrow round trips as in a
    job.
    """
    text = pickle.loads(pickle.dumps(text))
    shards = [json.loads(json.dumps(shard)) for shard in text.shards()]
    results = [result for shard in shards for result in text.scan(shard)]
    pa.Table.from_pylist([r.row() for r in results if isinstance(r, Item)], ITEM)
    pa.Table.from_pylist([r.row() for r in results if isinstance(r, Reject)], REJECT)
    return results


def write_lines(path: Path, *records: object) -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_folder_is_listed_in_order(tmp_path: Path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x.md").write_text("# Deep")
    (tmp_path / "b" / "UPPER.TXT").write_text("upper")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    text = source(tmp_path)
    text.check()
    items = listed(text)
    assert [i.item_id for i in items] == ["a.txt", "b/UPPER.TXT", "b/deep/x.md"]
    assert items[0] == Item(
        item_id="a.txt",
        parent_id="a.txt",
        source=tmp_path.name,
        modality="text",
        revision=items[0].revision,
        text="one\r\ntwo",  # unchanged except for the byte order mark
    )
    named = source(f"{tmp_path}/", collection="notes")
    assert listed(named) == [Item(**{**vars(i), "source": "notes"}) for i in items]


def test_single_file(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    text = source(tmp_path / "a.txt")
    text.check()
    assert [(i.item_id, i.text) for i in listed(text)] == [("a.txt", "one")]


@pytest.mark.parametrize("root", ["memory://texts", "memory://"])
def test_any_fsspec_uri(root: str):
    fs = fsspec.filesystem("memory")
    fs.rm("/", recursive=True) if fs.ls("/") else None
    fs.pipe("/texts/sub/a.md", b"in memory")
    fs.pipe("/texts/docs.jsonl", b'{"id": "j", "text": "line"}\n')
    text = source(root)
    text.check()
    prefix = "texts/" if root == "memory://" else ""
    assert {i.item_id: i.text for i in listed(text)} == {
        f"{prefix}sub/a.md": "in memory",
        "j": "line",
    }
    fs.rm("/", recursive=True)


def test_files_per_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    monkeypatch.setattr(text_module, "FILES_PER_SHARD", 3)
    text = source(tmp_path)
    assert [len(shard["files"]) for shard in text.shards()] == [3, 3, 1]
    assert [i.item_id for i in listed(text)] == [f"{i}.txt" for i in range(7)]


def test_links_are_followed_without_cycles(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("linked")
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "to-folder").symlink_to(tmp_path / "elsewhere")
    (root / "to-file.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    (root / "sub" / "circle").symlink_to(root)
    (root / "broken.txt").symlink_to(tmp_path / "gone.txt")
    results = listed(source(root))
    assert [r.item_id for r in results if isinstance(r, Item)] == ["to-file.txt", "to-folder/a.txt"]
    [broken] = [r for r in results if isinstance(r, Reject)]
    assert (broken.item_id, broken.reason, broken.retryable) == (
        "broken.txt",
        "unreadable file",
        True,
    )


def test_invalid_files_are_rejected(tmp_path: Path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b"\xef\xbb\xbf \n\t\r\n")
    (tmp_path / "new\nline.txt").write_text("text")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/latin-\xe9.txt")).write_text("text")
    (tmp_path / "good.txt").write_text("good")
    results = {r.item_id: r for r in listed(source(tmp_path))}
    assert {i: r.reason for i, r in results.items() if isinstance(r, Reject)} == {
        "bad.txt": "not UTF-8",
        "empty.txt": "empty text",
        "blank.txt": "empty text",
        "new\nline.txt": "bad id",
        "latin-\\udce9.txt": "bad id",
    }
    assert all(
        r.stage == "list" and not r.retryable for r in results.values() if r != results["good.txt"]
    )
    assert results["good.txt"].text == "good"


def test_file_removed_after_listing(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    write_lines(tmp_path / "c.jsonl", {"id": "c", "text": "c"})
    text = source(tmp_path)
    shards = list(text.shards())
    (tmp_path / "a.txt").unlink()
    (tmp_path / "c.jsonl").unlink()
    results = {r.item_id: r for shard in shards for r in text.scan(shard)}
    assert isinstance(results["b.txt"], Item)
    for name in ("a.txt", "c.jsonl#byte=0"):
        assert results[name].reason == "unreadable file"
        assert results[name].retryable


def test_unlistable_folder_is_rejected(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    folder = os.open(tmp_path, os.O_RDONLY)
    name, depth = "d" * 250, 0
    while depth < 17:  # exceeds the maximum path length of the system
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder, depth = inner, depth + 1
    os.close(folder)
    item, reject = listed(source(tmp_path))
    assert item.item_id == "a.txt"
    assert reject.reason == "unreadable file"
    assert reject.item_id.startswith("ddd")
    assert reject.retryable
    assert len(reject.detail) <= 500


def test_json_lines(tmp_path: Path):
    path = write_lines(
        tmp_path / "docs.jsonl",
        {"_id": "a", "title": "On wings", "text": "On wings. They lift.", "year": 1950},
        {"id": "b", "title": "On wings", "text": "They lift."},
        {"_id": 7, "id": "kept", "text": "no title"},
        {"id": "c", "title": None, "text": "null title"},
        {"id": "d", "title": "only a title", "text": ""},
        {"id": "e", "title": "wing", "text": "wings differ"},
        b"",
        b'{"id": "f", "text": "carriage return"}\r',
    )
    items = {i.item_id: i for i in listed(source(path))}
    assert list(items) == ["a", "b", "7", "c", "d", "e", "f"]
    assert items["a"].text == "On wings. They lift."
    assert items["a"].metadata == {"year": 1950}
    assert items["b"].text == "On wings\nThey lift."
    assert items["b"].title == "On wings"
    assert items["7"].metadata == {"id": "kept"}
    assert items["7"].title is None
    assert items["c"].text == "null title"
    assert items["c"].metadata is None
    assert items["d"].text == "only a title"
    assert items["e"].text == "wing\nwings differ"
    assert items["f"].text == "carriage return"
    assert all(i.parent_id == i.item_id and i.span is None for i in items.values())


def test_field_options(tmp_path: Path):
    path = write_lines(tmp_path / "d.jsonl", {"key": "k", "_id": "x", "body": "b", "name": "n"})
    [item] = listed(source(path, id_field="key", text_field="body", title_field="name"))
    assert (item.item_id, item.text, item.title) == ("k", "n\nb", "n")
    assert item.metadata == {"_id": "x"}
    [reject] = listed(source(path, id_field="id", text_field="body"))
    assert (reject.reason, reject.detail) == ("missing id", "no field id")


def test_invalid_lines_are_rejected(tmp_path: Path):
    bad = [
        (b'{"id": "latin", "text": "caf\xe9"}', "not UTF-8", None),
        (b'{"id": "half", "text": "\\ud800"}', "not UTF-8", None),
        (b'{"id": "cut", "text": "', "not JSON", None),
        (b'{"id": "nan", "text": "t", "x": NaN}', "not JSON", None),
        (b"[" * 100_000, "not JSON", None),
        (b'["id", "text"]', "not a JSON object", None),
        (b'{"text": "t"}', "missing id", None),
        (b'{"id": "", "text": "t"}', "bad id", None),
        (b'{"id": "a\\tb", "text": "t"}', "bad id", None),
        (b'{"id": true, "text": "t"}', "bad id", None),
        (b'{"id": 1.5, "text": "t"}', "bad id", None),
        (json.dumps({"id": "x" * 513, "text": "t"}).encode(), "bad id", None),
        (b'{"id": "none"}', "text is not a string", "none"),
        (b'{"id": "number", "text": 3}', "text is not a string", "number"),
        (b'{"id": "title", "title": 3, "text": "t"}', "title is not a string", "title"),
        (b'{"id": "blank", "text": " \\n"}', "empty text", "blank"),
    ]
    expected, lines = [], []
    for line, reason, item_id in bad:
        expected += [(item_id or f"d.jsonl:{len(lines) + 1}", reason), ("good", None)]
        lines += [line, b'{"id": "good", "text": "g\\u00e9"}']
    results = listed(source(write_lines(tmp_path / "d.jsonl", *lines)))
    assert [(r.item_id, getattr(r, "reason", None)) for r in results] == expected
    rejects = [r for r in results if isinstance(r, Reject)]
    assert all(r.revision and r.stage == "list" and not r.retryable for r in rejects)
    assert rejects[2].detail == "Invalid control character at, column 24"


def test_byte_order_mark(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "text": "t"}')  # without a final newline
    assert [i.item_id for i in listed(source(path))] == ["a"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_byte_ranges_partition_the_lines(tmp_path: Path, newline: bytes, last: bool):
    rng = random.Random(3)
    lines = [bytes(rng.choices(b"abc\xc3\xa9", k=rng.choice([0, 1, 5, 40]))) for _ in range(30)]
    content = newline.join(lines) + (newline if last else b"")
    path = tmp_path / "lines"
    path.write_bytes(content)
    with path.open("rb") as stream:
        whole = list(read_lines(stream, 0, None))
        assert b"".join(line for _, line in whole) == content
        assert all(content[offset:].startswith(line) for offset, line in whole)
        for size in range(1, len(content) + 2):
            parts = []
            for start in range(0, len(content), size):
                stream.seek(0)
                parts += read_lines(stream, start, min(start + size, len(content)))
            assert parts == whole, size


@pytest.mark.parametrize("size", [1, 7, 100, 4096, 1 << 20])
def test_shards_partition_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int):
    records = [{"id": f"d{i}", "text": "wörd " * (i * i % 90)} for i in range(40)]
    path = write_lines(tmp_path / "d.jsonl", b"broken", *records, b"", b"broken", b"")
    text = source(path, passages={"max_words": 20, "overlap_words": 5})
    whole = list(text.scan({"lines": "d.jsonl", "start": 0, "end": None}))
    monkeypatch.setattr(text_module, "BYTES_PER_SHARD", size)
    assert listed(text) == whole
    assert {r.parent_id for r in whole if isinstance(r, Item)} | {
        r.item_id for r in whole if isinstance(r, Reject)
    } == {f"d{i}" for i in range(40)} | {"d.jsonl:1", "d.jsonl:43"}


def test_newline_count_of_changed_file(tmp_path: Path):
    fs, path = LocalFileSystem(), str(tmp_path / "lines")
    for content in (b"a\nb\n\nc", b"abc\n" * 9):
        Path(path).write_bytes(content)
        for end in (2, len(content), 3, 0):  # beyond and before the cached position
            assert count_newlines(fs, path, end) == content[:end].count(b"\n")


def test_line_longer_than_several_shards(tmp_path: Path):
    text = "long " * 700_000
    records = [{"id": "a", "text": "before"}, {"id": "b", "text": text}, {"id": "c", "text": "c"}]
    results = listed(source(write_lines(tmp_path / "d.jsonl", *records)))
    assert [(i.item_id, i.text) for i in results] == [("a", "before"), ("b", text), ("c", "c")]


def test_gzip_is_one_shard(tmp_path: Path):
    records = [{"id": f"d{i}", "text": f"text {i}"} for i in range(5)]
    plain = write_lines(tmp_path / "d.jsonl", *records)
    packed = tmp_path / "e.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert len(list(source(packed).shards())) == 1
    strip = [(i.item_id, i.text, i.revision) for i in listed(source(plain))]
    assert [(i.item_id, i.text, i.revision) for i in listed(source(packed))] == strip


def test_truncated_gzip(tmp_path: Path):
    rng = random.Random(1)
    lines = [json.dumps({"id": str(i), "text": str(rng.random())}) for i in range(5000)]
    packed = gzip.compress("\n".join(lines).encode())
    (tmp_path / "d.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "e.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "f.jsonl").write_text('{"id": "f", "text": "f"}')
    *items, first, second, last = listed(source(tmp_path))
    assert len(items) > 1000
    assert [i.item_id for i in items] == [str(i) for i in range(len(items))]
    assert first.reason == second.reason == "unreadable file"
    assert first.retryable
    offset = sum(len(line) + 1 for line in lines[: len(items)])
    assert (first.item_id, second.item_id) == (f"d.jsonl.gz#byte={offset}", "e.jsonl.gz#byte=0")
    assert last.item_id == "f"


def random_document(rng: random.Random) -> str:
    alphabet = "abcdé漢字かな😀\u0301.,#"
    spaces = [" ", "  ", "\n", "\r\n", "\u3000", "\t"]
    words = ["".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 80))]
    return "".join(word + rng.choice(spaces) for word in words) * rng.randint(1, 2)


def count(text: str) -> int:
    """Returns the number of words; Chinese and Japanese characters are words."""
    characters = re.findall(r"[\u3040-\u30ff\u4e00-\u9fff]", text)
    return len(characters) + len(re.sub(r"[\u3040-\u30ff\u4e00-\u9fff]", " ", text).split())


@pytest.mark.parametrize("seed", range(50))
def test_windows_cover_all_words(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    document = random_document(rng)
    max_words = rng.randint(1, 40)
    passages = {"max_words": max_words, "overlap_words": rng.randint(0, max_words - 1)}
    (tmp_path / "d.md").write_bytes(document.encode())
    items = listed(source(tmp_path, passages=passages))
    if count(document) <= max_words:
        [item] = items
        assert (item.item_id, item.span, item.text) == ("d.md", None, document)
        return
    covered = set()
    for item in items:
        unit, start, end = item.span
        assert item.item_id == f"d.md#{start}-{end}"
        assert item.parent_id == "d.md"
        assert unit == "characters"
        assert item.text == document[start:end]
        assert count(item.text) == max_words or (item is items[-1] and count(item.text) < max_words)
        covered |= set(range(start, end))
    assert all(i in covered or c.isspace() for i, c in enumerate(document))
    for before, after in itertools.pairwise(items):
        shared = document[after.span[1] : before.span[2]]
        assert count(shared) == passages["overlap_words"]
        assert after.span[2] > before.span[2]


def test_document_of_one_word_too_many(tmp_path: Path):
    words = [f"w{i}" for i in range(401)]
    default = Passages()
    assert windows(" ".join(words[:400]), default) == []
    cut = windows(" ".join(words), default)
    assert [" ".join(words)[s:e].split() for s, e in cut] == [words[:400], words[350:]]


def test_document_without_spaces_is_divided():
    assert windows("漢字" * 300, Passages(max_words=400, overlap_words=0)) == [(0, 400), (400, 600)]


def test_window_with_too_long_id_is_rejected(tmp_path: Path):
    path = write_lines(tmp_path / "d.jsonl", {"id": "x" * 512, "text": "a b c"})
    assert [type(r) for r in listed(source(path))] == [Item]
    rejects = listed(source(path, passages={"max_words": 2, "overlap_words": 0}))
    assert [r.reason for r in rejects] == ["bad id", "bad id"]


def test_revision_depends_on_stored_content(tmp_path: Path):
    def revision(record: dict, **options: object) -> str:
        [item] = listed(source(write_lines(tmp_path / "d.jsonl", record), **options))
        return item.revision

    base = {"id": "a", "title": "t", "text": "some text"}
    assert len(revision(base)) == 16
    assert revision(base) == revision({**base, "id": "b"}) == revision(base, passages={})
    changed = [{**base, "text": "t"}, {**base, "title": "s"}, {**base, "year": 1}]
    assert len({revision(record) for record in [base, *changed]}) == 4


def test_check_errors(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "beir").mkdir()
    (tmp_path / "beir" / "queries.jsonl").write_text("{}")
    (tmp_path / "zero.jsonl").touch()
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "corpus.jsonl").touch()
    (tmp_path / "a.pdf").touch()
    for path, words in {
        "": "at least 1 character",
        tmp_path / "missing": "does not exist",
        tmp_path
        / "empty": r"\.txt, \.md, \.jsonl, \.jsonl\.gz files, got .* which contains no such files",
        tmp_path / "beir": "contains no corpus.jsonl",
        tmp_path / "zero.jsonl": "is an empty file",
        tmp_path / "zero": "is an empty file",
        tmp_path / "a.pdf": "a file ending in",
        "nosuch://a/b": "cannot be opened",
        "memory://nothing/here": "does not exist",
    }.items():
        with pytest.raises(SpecError, match=f"^path must .*{words}"):
            source(path).check()


def test_rejects_overlap_of_window_size():
    with pytest.raises(
        SpecError,
        match=r"^passages.overlap_words must be an integer below"
        r" max_words .9., got 9",
    ):
        source("x", passages={"max_words": 9, "overlap_words": 9})


def test_cranfield():
    text = source(CRANFIELD)
    text.check()
    assert len(list(text.shards())) == 1
    results = listed(text)
    assert Counter(type(r) for r in results) == {Item: 1398, Reject: 2}
    assert [(r.item_id, r.reason) for r in results if isinstance(r, Reject)] == [
        ("471", "empty text"),
        ("995", "empty text"),
    ]
    assert listed(text) == results


def test_cranfield_with_passages():
    results = listed(source(CRANFIELD, passages={}))
    items = [r for r in results if isinstance(r, Item)]
    assert (len(items), len(results) - len(items)) == (1423, 2)
    windowed = {i.parent_id for i in items if i.span}
    assert len(windowed) == 25
    assert len({i.item_id for i in items}) == len(items)
    whole = {i.item_id: i.text for i in listed(source(CRANFIELD)) if isinstance(i, Item)}
    assert all(
        i.text == whole[i.parent_id][int(i.span[1]) : int(i.span[2])] for i in items if i.span
    )


@pytest.mark.parametrize(
    ("text", "max_characters"),
    [
        ("\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e" * 400, 3_000),  # Thai
        ("\u1797\u17d2\u1793\u17c6\u1796\u17c1\u1789" * 400, 3_000),  # Khmer
        ("\u0e9e\u0eb2\u0eaa\u0eb2\u0ea5\u0eb2\u0ea7" * 400, 3_000),  # Lao
        ("\u1019\u103c\u1014\u103a\u1019\u102c" * 800, 3_000),  # Burmese
        ("\u0f56\u0f7c\u0f51\u0f0b" * 1_000, 3_200),  # Tibetan
        ("aGVsbG8gd29ybGQ" * 4_000, 40_000),  # encoded data
    ],
)
def test_texts_without_spaces_are_divided(text, max_characters):
    found = windows(text, Passages(max_words=400, overlap_words=50))
    assert found[0][0] == 0 and found[-1][1] == len(text) and len(found) > 1
    assert all(end - start <= max_characters for start, end in found)
    assert all(before[1] > after[0] for before, after in itertools.pairwise(found))


def test_encodings(tmp_path):
    for encoding in ("utf-8-sig", "utf-16", "utf-32", "latin-1"):
        (tmp_path / f"{encoding}.txt").write_bytes("a caf\xe9 table".encode(encoding))
    spec = Text.Spec(path=str(tmp_path))
    found = {e.item_id: e for shard in Text(spec).shards() for e in Text(spec).scan(shard)}
    latin = found.pop("latin-1.txt")
    assert latin.reason == "not UTF-8" and latin.detail == (
        "text must be UTF-8, or UTF-16 or UTF-32 with a byte order mark,"
        " got byte 0xe9 at position 5"
    )
    assert {item.text for item in found.values()} == {"a caf\xe9 table"} and len(found) == 3
