"""Files in folders, archives and other file systems, and the detection of changes."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import soundfile

from pipeline.config import SpecError
from pipeline.data import media
from pipeline.data.audio import Audio
from pipeline.data.media import read_members, read_zip_members
from pipeline.schema import Item, Reject
from tests.data.test_audio import read, samples, stored
from tests.media import frequency, make_tar


def source(path: Path | str, wants: tuple[str, ...] = ("audio",), **options: Any) -> Audio:
    return Audio(Audio.Spec(path=str(path), window_seconds=None, **options), wants)


def wav(tone: float, seconds: float = 0.5) -> bytes:
    """Returns a WAV file with a single tone, which identifies it."""
    time = np.arange(round(seconds * 16_000)) / 16_000
    stream = io.BytesIO()
    soundfile.write(stream, 0.5 * np.sin(2 * np.pi * tone * time), 16_000, format="WAV")
    return stream.getvalue()


def tone(item: Item) -> float:
    return round(frequency(samples(item), 16_000))


def reasons(results: dict[str, Item | Reject]) -> dict[str, str]:
    return {name: entry.reason for name, entry in results.items() if isinstance(entry, Reject)}


# -- folders ---------------------------------------------------------------------------------


def test_nested_folders(tmp_path):
    (tmp_path / "b/c").mkdir(parents=True)
    (tmp_path / "b/c/x.WAV").write_bytes(wav(500))
    (tmp_path / "a.wav").write_bytes(wav(700))
    (tmp_path / "a.txt").write_text("not of this source")
    results = read(source(tmp_path))
    assert {name: tone(item) for name, item in results.items()} == {"a.wav": 700, "b/c/x.WAV": 500}
    assert "file" not in results["a.wav"].metadata
    (single,) = read(source(tmp_path / "a.wav")).values()
    assert single.item_id == "a.wav"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "nowhere",
            "path must be an existing file or folder, got '.*nowhere', which does not exist",
        ),
        ("a.txt", "path must be a folder, or a file ending in .wav.*, got '.*a.txt'"),
        (
            "",
            "path must be a folder with files ending in .wav.*, got '.*', which"
            " contains no such files",
        ),
    ],
)
def test_check_rejects_path_without_items(tmp_path, name, sentence):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SpecError, match=sentence):
        source(tmp_path / name).check()


def test_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe.wav")  # opening it would wait for a writer
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.wav").write_bytes(wav(500))
    results = read(source(tmp_path))
    assert set(results) == {"a.wav", "pipe.wav"}
    assert reasons(results) == {"pipe.wav": "not a regular file"}


def test_shard_sizes(tmp_path, monkeypatch):
    for number in range(600):
        (tmp_path / f"{number:03}.wav").write_bytes(b"x" * (1 + number % 2))
    (tmp_path / "b.tar").write_bytes(make_tar([]))

    def sizes(**options: Any) -> list[int]:
        shards = list(source(tmp_path, **options).shards())
        assert {"archive": "b.tar"} in shards
        files = [shard["files"] for shard in shards if "files" in shard]
        assert len({name for name, _ in itertools.chain(*files)}) == 600
        return [len(group) for group in files]

    assert sizes() == [600]
    monkeypatch.setattr(Audio, "files_per_shard", 250)
    assert sizes() == [250, 250, 100]
    monkeypatch.setattr(media, "BYTES_PER_SHARD", 300)
    assert sizes() == [200, 200, 200]
    assert sizes(revision="stat") == [250, 250, 100]  # listing reads no files


def test_file_name_that_is_not_a_valid_id(tmp_path):
    (tmp_path / "a\nb.wav").write_bytes(wav(500))
    assert list(reasons(read(source(tmp_path))).values()) == ["bad id"]


# -- archives --------------------------------------------------------------------------------


def test_archive(tmp_path):
    members = [
        ("a/001.wav", wav(500)),
        ("a/001.txt", b"a caption"),
        ("a/002.flac.wav", wav(600)),  # has two suffixes; only the last one counts
        ("a/readme", b"not of this source"),
        ("003.mp3", b"text"),
        ("004.wav", b""),
    ]
    (tmp_path / "x.tar").write_bytes(make_tar(members))
    results = read(source(tmp_path))
    assert reasons(results) == {"003": "not audio", "004": "empty file"}
    assert results["003"].detail.endswith(" (file x.tar)") and results["004"].detail == "file x.tar"
    good = {name: tone(item) for name, item in results.items() if isinstance(item, Item)}
    assert good == {"a/001": 500, "a/002.flac": 600}
    location = results["a/001"].metadata
    offset, size = location["bytes"]
    assert location["file"] == "x.tar"
    assert (tmp_path / "x.tar").read_bytes()[offset : offset + size] == wav(500)


def test_files_of_same_sample_have_different_ids(tmp_path):
    (tmp_path / "x.tar").write_bytes(make_tar([("1.wav", wav(500)), ("1.flac", wav(600))]))
    assert set(read(source(tmp_path))) == {"1.wav", "1.flac"}


def test_ids_by_path(tmp_path):
    for name, height in (("x.tar", 500), ("y.tar", 600)):
        (tmp_path / name).write_bytes(make_tar([("1.wav", wav(height))]))
    results = read(source(tmp_path, ids="path"))
    assert {name: tone(item) for name, item in results.items()} == {
        "x.tar/1.wav": 500,
        "y.tar/1.wav": 600,
    }


def test_audio_preview_from_archive(tmp_path):
    (tmp_path / "x.tar").write_bytes(make_tar([("1.wav", wav(500)), ("2.wav", wav(600))]))
    media = source(tmp_path)
    item = read(media)["2"]
    samples, rate, _ = source(tmp_path).preview_audio(stored(item))
    assert round(frequency(samples, rate)) == 600


def test_corrupted_header_rejects_its_member(tmp_path):
    members = [(f"{number}.wav", wav(500 + 100 * number)) for number in range(4)]
    data = bytearray(make_tar(members))
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as archive:
        second = archive.getmembers()[1].offset
    data[second : second + 512] = os.urandom(512)
    (tmp_path / "x.tar").write_bytes(data)
    results = read(source(tmp_path))
    assert list(reasons(results).values()) == ["corrupted archive"]
    good = {name: tone(item) for name, item in results.items() if isinstance(item, Item)}
    assert good == {"0": 500, "2": 700, "3": 800}


def test_truncated_archive(tmp_path):
    members = [(f"{number}.wav", wav(500)) for number in range(3)]
    data = make_tar(members)
    size = len(wav(500))
    (tmp_path / "x.tar").write_bytes(data[: 2 * (512 + -(-size // 512) * 512) + 512 + size // 2])
    results = read(source(tmp_path))
    assert [name for name, item in results.items() if isinstance(item, Item)] == ["0", "1"]
    assert reasons(results) == {"x.tar/2.wav": "corrupted archive"}


@pytest.mark.parametrize("content", [b"This is no archive. " * 500, b"short"])
def test_invalid_archive_is_one_reject(tmp_path, content):
    (tmp_path / "x.tar").write_bytes(content)
    (tmp_path / "a.wav").write_bytes(wav(500))
    results = read(source(tmp_path))
    assert reasons(results) == {"x.tar": "not a tar archive"}
    assert len(results) == 2


def test_empty_archive_has_no_items(tmp_path):
    (tmp_path / "x.tar").write_bytes(make_tar([]))
    (tmp_path / "a.wav").write_bytes(wav(500))
    assert list(read(source(tmp_path))) == ["a.wav"]


# -- other file systems ----------------------------------------------------------------------


def test_files_on_other_file_systems():
    for name, data in (("a.wav", wav(500)), ("b.tar", make_tar([("c.wav", wav(600))]))):
        with fsspec.open(f"memory://sounds/{name}", "wb") as file:
            file.write(data)
    results = read(source("memory://sounds"))
    assert {name: tone(item) for name, item in results.items()} == {"a.wav": 500, "c": 600}


def test_file_removed_after_listing(tmp_path):
    (tmp_path / "a.wav").write_bytes(wav(500))
    (tmp_path / "b.wav").write_bytes(wav(600))
    media = source(tmp_path)
    (shard,) = media.shards()
    listed = list(enumerate(media.scan(shard)))
    (tmp_path / "a.wav").unlink()
    removed, intact = media.decode(shard, listed)
    assert isinstance(removed, Reject) and removed.retryable and removed.stage == "decode"
    assert tone(intact) == 600


# -- revisions -------------------------------------------------------------------------------


def revisions(path: Path, **options: Any) -> dict[str, str]:
    media = source(path, **options)
    return {e.item_id: e.revision for shard in media.shards() for e in media.scan(shard)}


def test_revision_by_content(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(500))
    before = revisions(tmp_path)
    os.utime(path, (1, 1))
    assert revisions(tmp_path) == before
    path.write_bytes(wav(510))
    assert revisions(tmp_path) != before


def test_revision_by_stat(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(500))
    os.utime(path, (1, 1))
    before = revisions(tmp_path, revision="stat")
    path.write_bytes(wav(510))
    os.utime(path, (1, 1))
    assert revisions(tmp_path, revision="stat") == before  # equal size and date
    os.utime(path, (2, 2))
    assert revisions(tmp_path, revision="stat") != before
    (tmp_path / "x.tar").write_bytes(make_tar([("1.wav", wav(500)), ("2.wav", wav(500))]))
    by_stat, by_content = revisions(tmp_path, revision="stat"), revisions(tmp_path)
    assert by_stat["1"] != by_stat["2"] and by_content["1"] == by_content["2"]


def test_links_in_archive_are_rejected(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, kind in (("a.wav", tarfile.SYMTYPE), ("b.wav", tarfile.LNKTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "c.wav"
            archive.addfile(link)
        folder = tarfile.TarInfo("sounds")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        member = tarfile.TarInfo("c.wav")
        member.size = len(wav(500))
        archive.addfile(member, io.BytesIO(wav(500)))
    results = read(source(tmp_path))
    assert isinstance(results.pop("c"), Item)
    assert [(name, r.reason, r.detail) for name, r in results.items()] == [
        ("x.tar/a.wav", "no file of its own", "is a link to c.wav"),
        ("x.tar/b.wav", "no file of its own", "is a link to c.wav"),
    ]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_encodings_of_sidecars(tmp_path, kind):
    contents = {"a": b"\xef\xbb\xbfa bus", "b": "a bus".encode("utf-16"), "c": b"a caf\xe9"}
    path = tmp_path / f"a.{kind}"
    if kind == "tar":
        with tarfile.open(path, "w") as archive:
            for name, content in contents.items():
                info = tarfile.TarInfo(f"{name}.txt")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in contents.items():
                archive.writestr(f"{name}.txt", content)
    with open(path, "rb") as stream:
        size = path.stat().st_size
        members = read_members(stream, size) if kind == "tar" else read_zip_members(stream)
        first, second, third = members
    assert first.text == second.text == "a bus"
    assert (third.name, third.reason) == ("c.txt", "not UTF-8")
