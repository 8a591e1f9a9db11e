"""ZIP archives of media files."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from pipeline.data.decode import Unreadable
from pipeline.data.media import member_stream
from pipeline.data.zip_members import zip_members
from tests import datasets
from tests.data.listing import build, read


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_equal_zipfile(compression):
    rng = np.random.default_rng(0)
    members = [
        ("a/random.bin", rng.bytes(3_000_000)),
        ("zeros.bin", bytes(2_500_000)),
        ("empty", b""),
        ("ü.txt", b"text"),
    ]
    archive = io.BytesIO(datasets.make_zip([("folder/", b""), *members], compression))
    found = list(zip_members(archive))
    assert [member.name for member in found] == [name for name, _ in members]
    for member, (_, data) in zip(found, members, strict=True):
        assert member.size == len(data) and not member.problem
        stream = member_stream(archive, member.offset, member.size, member.deflated)
        parts = list(iter(lambda stream=stream: stream.read(70_001), b""))
        assert b"".join(parts) == data and max(map(len, parts), default=0) <= 70_001
        whole = member_stream(archive, member.offset, member.size, member.deflated)
        assert whole.read() == data and whole.read() == b""


def test_corrupted_archives():
    data = bytearray(datasets.make_zip([("a.txt", b"hello " * 1000)]))
    member = next(zip_members(io.BytesIO(bytes(data))))
    data[member.offset : member.offset + 8] = b"\xff" * 8
    (found,) = zip_members(io.BytesIO(bytes(data)))
    stream = member_stream(io.BytesIO(bytes(data)), found.offset, found.size, found.deflated)
    with pytest.raises(Unreadable, match="corrupted archive"):
        stream.read()
    data[:4] = b"none"
    (found,) = zip_members(io.BytesIO(bytes(data)))
    assert found.problem == "has no header at its offset"
    with pytest.raises(Unreadable, match="not a zip archive"):
        list(zip_members(io.BytesIO(b"PK\x05\x06")))
    unsupported = io.BytesIO(datasets.make_zip([("a", b"a" * 100)], zipfile.ZIP_BZIP2))
    assert next(zip_members(unsupported)).problem == "has the unsupported compression method 12"


def test_one_corrupted_member_is_a_reject(tmp_path):
    photos = datasets.photos(3)
    members = [(f"set/{number}.jpg", data) for number, data in enumerate(photos)]
    data = bytearray(datasets.make_zip(members))
    second = list(zip_members(io.BytesIO(bytes(data))))[1]
    data[second.offset : second.offset + 64] = b"\xff" * 64
    (tmp_path / "images.zip").write_bytes(bytes(data))
    items, (reject,) = read(build("images", ("image",), path=str(tmp_path)))
    assert list(items) == ["set/0", "set/2"] and reject.item_id == "set/1"
    assert reject.reason == "corrupted archive"
    source = build("images", path=str(tmp_path), revision="stat")
    items, _ = read(source)
    item = items["set/0"]
    assert source.preview_image({**item.row(), "metadata": item.metadata})
