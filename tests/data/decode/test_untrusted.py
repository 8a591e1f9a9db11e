"""Malicious files that try to hang, crash or exhaust the process that reads them."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import SpecError
from pipeline.data import manifests, vector_files
from pipeline.data.audio import Audio
from pipeline.data.base import Source
from pipeline.data.decode import Unreadable, untrusted
from pipeline.data.decode.process import DecodingProcess, Limits, PipedProcess
from pipeline.data.images import Images
from pipeline.data.pages import Pages
from pipeline.data.text import MAX_JSON_DEPTH, Text, parse_line
from pipeline.data.vectors import Vectors
from pipeline.data.video import Video
from pipeline.schema import Item, Reject
from tests.conftest import ROOT

KINDS = {
    Text: ("a.txt", "a.jsonl", "a.jsonl.gz"),
    Pages: ("a.pdf",),
    Images: ("a.png", "a.tar", "a.parquet"),
    Audio: ("a.wav",),
    Vectors: ("a.parquet", "a.arrow"),
}
CASES = [(kind, name) for kind, names in KINDS.items() for name in names]


def source(kind: type[Source], path: Path, **options: Any) -> Source:
    if kind is Vectors:
        options["dim"] = 2
    return kind(kind.Spec(path=str(path), **options), kind.provides)


def listed(read: Source) -> list[Item | Reject]:
    return [entry for shard in read.shards() for entry in read.scan(shard)]


def reasons(read: Source) -> dict[str, str]:
    return {e.item_id: e.reason for e in listed(read) if isinstance(e, Reject)}


# -- special files ---------------------------------------------------------------------------


@pytest.fixture(params=["pipe", "socket", "device", "link to a pipe"])
def special(request, tmp_path) -> Path:
    path = tmp_path / "special"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    return path


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_special_file_is_rejected(tmp_path, special, kind, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).symlink_to(special)
    (tmp_path / "folder" / "other.sock").symlink_to(special)  # has an unsupported suffix
    (results,) = listed(source(kind, tmp_path / "folder"))
    if kind is not Vectors:  # Vectors has a single reason for unreadable files
        assert results.reason == "not a regular file"
    assert "must be a regular file, is a" in results.detail


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_special_file_is_not_a_source(tmp_path, special, kind, name):
    (tmp_path / name).symlink_to(special)
    with pytest.raises(
        SpecError,
        match=r"^path must be a regular file or a folder, got '.*',"
        r" which is a \w+",
    ):
        source(kind, tmp_path / name).check()


def test_special_file_in_manifest(tmp_path, special):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "a", "image": special.name}))
    assert reasons(source(Images, tmp_path / "a.jsonl")) == {"a": "not a regular file"}


def test_file_replaced_by_pipe_after_listing(tmp_path):
    from fsspec.implementations.local import LocalFileSystem

    (tmp_path / "a.txt").write_text("words")
    read = source(Text, tmp_path)
    shards = list(read.shards())
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    (results,) = read.scan(shards[0])
    assert results.reason == "not a regular file"
    with pytest.raises(Unreadable, match="is a pipe"):
        untrusted.open_file(LocalFileSystem(), str(tmp_path / "a.txt"))


# -- JSON ------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return json.dumps({"id": "b", "text": "x", "image": "a.png", "deep": 0}).replace(
        "0", "[" * depth + "]" * depth
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_invalid_lines_are_rejected(tmp_path, name):
    good = json.dumps({"id": "c", "text": "words"})
    long = json.dumps({"id": "a", "text": "x" * 5_000})
    content = "\n".join(
        [long, nested(99), nested(500), nested(100_000), "[" * 900, good, "x" * 5_000]
    )
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    results = listed(source(Text, tmp_path, max_document_bytes=4_096))
    assert [getattr(entry, "reason", entry.item_id) for entry in results] == [
        *("too long", "b", "not JSON", "too long", "not JSON", "c", "too long")
    ]
    assert results[0].item_id == f"{name}:1"
    assert results[0].detail == "line must be at most 4,096 bytes, got more"
    assert "at most 100 levels deep" in results[2].detail


def test_too_long_file(tmp_path):
    (tmp_path / "a.txt").write_text("x " * 1_000)
    (tmp_path / "b.txt").write_text("x " * 100)
    assert reasons(source(Text, tmp_path, max_document_bytes=1_024)) == {"a.txt": "too long"}


def test_maximum_json_depth():
    assert parse_line(json.dumps([[1, "[" * 500]] * 300).encode())
    assert parse_line(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)
    with pytest.raises(ValueError, match="nested at most 100 levels"):
        parse_line(b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1))


def test_manifest_limits(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"x")
    monkeypatch.setattr(manifests, "MAX_VALUE_BYTES", 4_096)
    monkeypatch.setattr(manifests, "MAX_TABLE_ROWS", 100)
    rows = ["x" * (untrusted.MAX_LINE_BYTES + 1), nested(500), nested(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    results = reasons(source(Images, tmp_path / "a.jsonl"))
    assert list(results.values())[:2] == ["too long", "not JSON"]
    (tmp_path / "b.json").write_text("[" + nested(500) + "]")
    assert reasons(source(Images, tmp_path / "b.json")) == {"b.json": "corrupted manifest"}
    (tmp_path / "c.json").write_text(" " * 5_000 + "[]")
    assert reasons(source(Images, tmp_path / "c.json")) == {"c.json": "too long"}
    pq.write_table(pa.table({"image": ["a.png"] * 101}), tmp_path / "d.parquet")
    assert reasons(source(Images, tmp_path / "d.parquet")) == {"d.parquet": "corrupted manifest"}


BOMBS = """
import resource, sys
from pathlib import Path
from pipeline.data.decode import untrusted
from pipeline.schema import Reject
from pipeline.data.images import Images
from pipeline.data.text import Text

untrusted.MAX_SEARCHED_BYTES = 1 << 24
folder = sys.argv[1]
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20),) * 2)
for kind, path in ((Text, folder), (Images, folder + "/bomb.jsonl.gz"), (Images, folder)):
    read = kind(kind.Spec(path=path), ("text",))
    for shard in read.shards():
        for entry in read.scan(shard):
            print(entry.item_id, entry.reason if isinstance(entry, Reject) else "good")
"""


def test_memory_of_decompression_bombs(tmp_path):
    """Reads a line of 320 MB and sparse files of 50 GB within 200 MB."""
    part = gzip.compress(bytes(64 << 20), 1)
    line = gzip.compress(b'\n{"_id": "good", "text": "words", "image": "good.png"}')
    (tmp_path / "bomb.jsonl.gz").write_bytes(part * 5 + line)
    (tmp_path / "good.png").write_bytes(b"x")
    for name in ("sparse.txt", "sparse.png", "sparse.tar"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(50 << 30)
    command = [sys.executable, "-c", BOMBS, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "bomb.jsonl.gz:1 too long" in lines and "good good" in lines
    assert "sparse.txt too long" in lines and "sparse.png too large" in lines
    assert any(line.startswith("sparse.tar") for line in lines)


# -- archives --------------------------------------------------------------------------------


def header(name: str, size: int = 0, type: bytes = tarfile.REGTYPE, **pax: str) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.pax_headers = size, type, pax
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def sparse(name: str, size: int) -> bytes:
    """Returns a sparse member in the old GNU format, without content."""
    block = bytearray(header(name, 0, tarfile.GNUTYPE_SPARSE))
    block[483:495] = b"\x80" + size.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


PNG = b"\x89PNG" + bytes(508)
GOOD = header("good.png", 512) + PNG
ARCHIVES = {
    "sparse": sparse("bad.png", 50 << 30) + GOOD,
    "sparse pax": header("bad.png", **{"GNU.sparse.map": "0,0", "GNU.sparse.size": "53687091200"})
    + GOOD,
    "a device": header("bad.png", 0, tarfile.CHRTYPE) + GOOD,
    "a pipe": header("bad.png", 0, tarfile.FIFOTYPE) + GOOD,
    "a long name": header("bad.png", 1 << 40, tarfile.GNUTYPE_LONGNAME) + GOOD,
    "long attributes": header("bad.png", 1 << 33, tarfile.XHDTYPE) + GOOD,
    "a negative size": header("bad.png", -(1 << 40)) + GOOD,
    "attributes of attributes": header("bad.png", 0, tarfile.XHDTYPE) * 3_000 + GOOD,
    "a negative size in attributes": header("bad.png", size="-1024") + GOOD,
    "a size of 2^64": header("bad.png", 1 << 64) + GOOD,
    "an unknown type of 2^64": header("bad.png", 1 << 64, b"Z") + GOOD,
    "a map that is none": header("bad.png", **{"GNU.sparse.map": "x"}) + GOOD,
}
ENDS = (
    *("attributes of attributes", "a negative size in attributes", "a map that is none"),
    *("a size of 2^64", "an unknown type of 2^64"),
)


@pytest.mark.parametrize("name", ARCHIVES)
def test_malformed_members_are_rejected(tmp_path, name):
    (tmp_path / "a.tar").write_bytes(ARCHIVES[name] + bytes(1024))
    results = {e.item_id: getattr(e, "reason", "good") for e in listed(source(Images, tmp_path))}
    assert len(results) > (name not in ENDS) and any(r != "good" for r in results.values())
    assert name in ENDS or results.pop("good") == "good"
    if name.startswith("sparse"):
        assert list(results.values()) == ["sparse member"]


def test_too_large_member(tmp_path):
    (tmp_path / "a.tar").write_bytes(header("bad.png", 2048) + bytes(2048) + GOOD)
    assert reasons(source(Images, tmp_path, max_file_bytes=1_024)) == {"bad": "too large"}


def test_search_for_members_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "MAX_SEARCHED_BYTES", 1 << 20)
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(GOOD)
        file.truncate(1 << 40)
    results = {e.item_id: e for e in listed(source(Images, tmp_path))}
    assert results.pop("good") and "no member within" in next(iter(results.values())).detail


# -- vectors ---------------------------------------------------------------------------------


def npy(path: Path, shape: str, descr: str = "<f4", data: bytes = b"", pad: int = 0) -> None:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()
    text += b" " * pad + b"\n"
    path.write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + data)


@pytest.mark.parametrize(
    ("shape", "pad"),
    [
        ("(2**62, 2)", 0),
        ("(4611686018427387904, 2)", 0),  # 2^65 bytes overflow int64 to 0
        ("(9223372036854775808, 2, 2)", 0),
        ("(-1, -2)", 0),
        ("(1, 2)", 1 << 20),
    ],
)
def test_invalid_npy_headers(tmp_path, shape, pad):
    npy(tmp_path / "vectors.npy", shape, pad=pad)
    (tmp_path / "ids.txt").write_text("a\n")
    with pytest.raises(SpecError, match=r"^path must be .*has an unreadable vectors.npy"):
        source(Vectors, tmp_path).check()


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([1 << 62] * 4 + [3], np.uint64),  # the sum overflows to 3
        np.array([(1 << 64) - 1, 4], np.uint64),
        np.array([1 << 62] * 4 + [3], np.int64),
    ],
)
def test_overflowing_lengths(tmp_path, lengths):
    np.save(tmp_path / "vectors.npy", np.zeros((3, 2), np.float32))
    np.save(tmp_path / "lengths.npy", lengths)
    (tmp_path / "ids.txt").write_text("".join(f"{i}\n" for i in range(len(lengths))))
    with pytest.raises(
        SpecError,
        match=r"^path must be a folder with at most .* vectors per"
        r" item, got .* has an item of",
    ):
        source(Vectors, tmp_path).check()


def test_unterminated_line_of_ids(tmp_path):
    np.save(tmp_path / "vectors.npy", np.zeros((1, 2), np.float32))
    with open(tmp_path / "ids.txt", "wb") as file:
        file.truncate(50 << 30)
    with pytest.raises(SpecError, match="has more than 65,536 bytes in line"):
        source(Vectors, tmp_path).check()


def test_rows_larger_than_their_file(tmp_path, monkeypatch):
    monkeypatch.setattr(vector_files, "MAX_ITEM_VALUES", 1_000)
    type = pa.list_(pa.list_(pa.float32()))
    rows = pa.array([[[0.0, 0.0]] * 2_000], type)
    pq.write_table(pa.table({"id": ["a"], "vectors": rows}), tmp_path / "a.parquet")
    (results,) = listed(source(Vectors, tmp_path))
    assert "must have at most 1,000 values per row, has 4,000" in results.detail


# -- replies of decoding processes -----------------------------------------------------------


def reply(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<Q", (1 << 64) - 1),
        struct.pack("<Q", 1 << 40),
        reply([1, 2]),
        reply({"bulk": [["a", "<f4", [1 << 62, 4]]]}),
        reply({"bulk": [["a", "<f4", [-1]]]}),
        reply({"bulk": [["a", "O", [1]]]}) + bytes(8),
        reply({"bulk": [["a", "nothing", [1]]]}),
        reply({"bulk": 3}),
        struct.pack("<Q", 4) + b"\xff{[]",
    ],
)
def test_malformed_replies(sent):
    """Sends replies that a compromised decoding process could send."""
    process = DecodingProcess("image", Limits(max_seconds=5))
    code = f"import sys; sys.stdout.buffer.write({sent!r}); sys.stdout.flush(); sys.stdin.read()"
    process._process = PipedProcess("-S", "-c", code, bufsize=0)
    with pytest.raises(Unreadable, match=r"^crashed: a malformed reply"):
        process.call("read_frame", "nowhere")


@pytest.mark.parametrize(("kind", "file"), [(Audio, "speech/jfk.flac"), (Video, "clips/talk.mp4")])
def test_unexpected_error_concerns_one_window(kind, file):
    windows = [[0.0, 1.0], ["0", 1.0], [1.0, 2.0]]
    settings = source(kind, ROOT / "jobs/data" / file, border_shift=0)._reader_settings()
    process = DecodingProcess(kind.module, Limits())
    path = str(ROOT / "jobs/data" / file)
    first, error, second = process.stream(3, "read_windows", path, windows, settings)
    assert first["info"] == second["info"]
    assert error.reason == "unexpected error" and "Error: " in error.detail


def test_error_of_one_result_and_of_the_module():
    (error,) = DecodingProcess("image", Limits()).stream(1, "read_image", str(ROOT / "LICENSE"), {})
    assert error.detail.startswith("TypeError: read_image() missing 1 required positional argument")
    with pytest.raises(Unreadable, match="^unexpected error: ModuleNotFoundError: No module"):
        DecodingProcess("nothing", Limits()).call("describe", "a")


def test_replies_have_no_surrogates():
    sent = reply({"title": "a\ud83d", "info": {"tag": "\ud83d\ude00"}})
    process = DecodingProcess("image", Limits(max_seconds=5))
    code = f"import sys; sys.stdout.buffer.write({sent!r}); sys.stdout.flush(); sys.stdin.read()"
    process._process = PipedProcess("-S", "-c", code, bufsize=0)
    assert process.call("describe", "a") == {"title": "a", "info": {"tag": "\U0001f600"}}


def test_sparse_header_is_valid():
    with tarfile.open(fileobj=io.BytesIO(ARCHIVES["sparse"] + bytes(1024))) as archive:
        bad, good = archive.getmembers()
    assert bad.issparse() and bad.size == 50 << 30 and good.size == 512
