"""The audio source."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import SpecError, parse
from pipeline.data.audio import Audio
from pipeline.data.base import Source, items_table
from pipeline.data.decode import Unreadable
from pipeline.data.windows import split_windows
from pipeline.schema import Item, Reject
from tests.media import frequency, tone_at, tones, write_audio, write_video


def source(path: Path | str, wants: tuple[str, ...] = ("audio",), **options: Any) -> Audio:
    return Audio(Audio.Spec(path=str(path), **options), wants)


def stored(item: Item) -> dict[str, Any]:
    """Returns the row of an item, as passed to previews."""
    return {**item.row(), "metadata": item.metadata}


def read(media: Source) -> dict[str, Item | Reject]:
    """Returns all decoded items and rejects of a source by id."""
    results = {}
    for shard in media.shards():
        entries = list(enumerate(media.scan(shard)))
        assert [e for _, e in entries] == list(media.scan(shard))
        wanted = [(position, entry) for position, entry in entries if isinstance(entry, Item)]
        results |= {entry.item_id: entry for _, entry in entries if isinstance(entry, Reject)}
        decoded = list(media.decode(shard, wanted))
        assert [result.item_id for result in decoded] == [item.item_id for _, item in wanted]
        results |= {result.item_id: result for result in decoded}
    items = [item for item in results.values() if isinstance(item, Item)]
    assert items_table(items, media.payload).num_rows == len(items)
    return results


def samples(item: Item) -> np.ndarray:
    return np.frombuffer(item.payload["audio"]["samples"], "<f4")


@pytest.mark.parametrize(
    ("duration", "window", "overlap", "expected"),
    [
        (12.3456, 30, 0, [(0, 12.346)]),
        (30, 30, 0, [(0, 30)]),
        (30.9, 30, 0, [(0, 30.9)]),  # a short remainder belongs to the previous window
        (31, 30, 0, [(0, 30), (30, 31)]),
        (90, 30, 0, [(0, 30), (30, 60), (60, 90)]),
        (35, 10, 5, [(0, 10), (5, 15), (10, 20), (15, 25), (20, 30), (25, 35)]),
        (35.5, 20, 15, [(0, 20), (5, 25), (10, 30), (15, 35.5)]),
        (1.2, 0.4 + 1, 0.4, [(0, 1.2)]),
        (0.02, 30, 0, [(0, 0.02)]),
    ],
)
def test_windows(duration, window, overlap, expected):
    assert split_windows(duration, window, overlap) == expected


@pytest.mark.parametrize("overlap", [0.0, 0.3, 7.0, 28.9])
def test_windows_cover_file_and_advance(overlap):
    for tenths in range(1, 2000):
        windows = split_windows(tenths / 10, 30.0, overlap)
        assert windows[0][0] == 0 and windows[-1][1] == tenths / 10
        for (start, end), (following, last) in itertools.pairwise(windows):
            assert start < following <= end and last - end >= 0.99
            assert end - start == pytest.approx(30)
        assert windows[-1][1] - windows[-1][0] < 31


def test_window_is_item(tmp_path):
    write_audio(tmp_path / "a.wav", tones(7, 44_100, 2), 44_100)
    results = read(source(tmp_path, window_seconds=3, overlap_seconds=1))
    assert list(results) == ["a.wav#t=0,3", "a.wav#t=2,5", "a.wav#t=4,7"]
    item = results["a.wav#t=2,5"]
    assert (item.parent_id, item.modality, item.span) == ("a.wav", "audio", ("seconds", 2, 5))
    assert item.metadata == {"duration": 7.0, "sample_rate": 44_100, "channels": 2}
    audio = item.payload["audio"]
    assert (audio["start"], audio["sample_rate"]) == (pytest.approx(2, abs=1e-4), 16_000)
    assert len(samples(item)) == 48_000
    assert frequency(samples(item)[3200:12_800], 16_000) == pytest.approx(tone_at(2.0), abs=4)


def test_file_is_item_without_windows(tmp_path):
    write_audio(tmp_path / "a.flac", tones(2.5))
    media = source(tmp_path, window_seconds=None)
    (item,) = read(media).values()
    assert (item.item_id, item.span) == ("a.flac", ("seconds", 0.0, 2.5))
    assert len(samples(item)) == 40_000
    (listed,) = media.scan(next(iter(media.shards())))
    assert listed.span is None  # the file was not opened


def test_all_formats(tmp_path):
    for suffix in ("wav", "flac", "ogg", "mp3"):
        write_audio(tmp_path / f"a.{suffix}", tones(2))
    write_video(tmp_path / "a.m4a", [], audio=tones(2))
    (tmp_path / "notes.txt").write_text("x")
    results = read(source(tmp_path, window_seconds=None))
    assert len(results) == 5
    for item in results.values():
        assert 31_000 < len(samples(item)) < 34_000
        assert item.payload["audio"]["start"] == pytest.approx(0, abs=0.05)


def test_audio_is_not_read_unless_wanted(tmp_path):
    write_audio(tmp_path / "a.wav", tones(2))
    (item,) = read(source(tmp_path, ("item_id",))).values()
    assert item.payload == {} and item.span == ("seconds", 0, 2)


def test_unreadable_files_are_rejected(tmp_path):
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.mp3").write_text("text")
    write_audio(tmp_path / "good.wav", tones(1))
    write_video(tmp_path / "silent.mp4", [0, 0.1]).rename(tmp_path / "silent.m4a")
    for window in (30.0, None):
        results = read(source(tmp_path, window_seconds=window))
        reasons = {name: r.reason for name, r in results.items() if isinstance(r, Reject)}
        silent = "no audio track"
        assert reasons == {"empty.wav": "empty file", "text.mp3": "not audio", "silent.m4a": silent}
        assert len(results) == 4


def test_audio_preview(tmp_path):
    write_audio(tmp_path / "a.wav", tones(7))
    media = source(tmp_path, window_seconds=3)
    item = read(media)["a.wav#t=3,6"]
    samples, rate, start = media.preview_audio(stored(replace(item, span=("seconds", 4.0, 4.9))))
    assert rate == 16_000 and frequency(samples, rate) == pytest.approx(tone_at(4.0), abs=4)
    assert start == pytest.approx(4.0, abs=0.01)
    with pytest.raises(Unreadable, match="nothing in this window"):
        media.preview_audio(stored(replace(item, span=("seconds", 40.0, 41.0))))


def test_revision_depends_on_decoding_options(tmp_path):
    path = write_audio(tmp_path / "a.wav", tones(1))

    def revision(**options: Any) -> str:
        return read(source(tmp_path, **options))["a.wav#t=0,1"].revision

    before = revision()
    assert revision(collection="other", limits={"max_seconds": 9}) == before
    assert revision(sample_rate=8000) != before != revision(border_shift=1)
    write_audio(path, 0.5 * tones(1))
    assert revision() != before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"window_seconds": 10, "overlap_seconds": 9.5},
            "overlap_seconds must be at least .*, got 9.5",
        ),
        (
            {"window_seconds": None, "overlap_seconds": 1},
            "overlap_seconds must be 0 when a whole file is one item, got 1.0",
        ),
        ({"window_seconds": 0.5}, "window_seconds"),
        ({"sample_rate": 10}, "sample_rate"),
        ({"border_shift": -1}, "border_shift"),
        ({"fps": 1}, "fps"),
    ],
)
def test_invalid_options(options, sentence):
    with pytest.raises(SpecError, match=sentence):
        parse(Audio.Spec, {"path": "x", **options})


def test_item_size_is_that_of_the_samples(tmp_path):
    write_audio(tmp_path / "a.wav", tones(5))

    def num_bytes(wants: tuple[str, ...] = ("audio",), **options: Any) -> list[int]:
        media = source(tmp_path, wants, **options)
        (shard,) = media.shards()
        return [media.item_size(shard, item).num_bytes for item in media.scan(shard)]

    assert num_bytes(window_seconds=3) == [3 * 64_000, 2 * 64_000]
    assert num_bytes(window_seconds=None) == [5 * 64_000]
    assert num_bytes(window_seconds=None, sample_rate=8000) == [5 * 32_000]
    assert num_bytes(("item_id",), window_seconds=None) == [0]
    # Without it, the duration follows from the size of the file.
    size = (tmp_path / "a.wav").stat().st_size
    assert num_bytes(window_seconds=None, revision="stat") == [size / 4000 * 64_000]


def test_item_size_does_not_depend_on_wrong_headers(tmp_path):
    data = bytearray(write_audio(tmp_path / "a.flac", tones(5)).read_bytes())
    for name, stated in {"unknown": 0, "short": 1, "long": 0xFFFFFFFF}.items():
        data[22:26] = stated.to_bytes(4, "big")
        (tmp_path / f"{name}.flac").write_bytes(data)
    data = bytearray(write_audio(tmp_path / "a.mp3", tones(5)).read_bytes())
    offset = data.index(b"Xing") + 8
    data[offset : offset + 4] = (1 << 24).to_bytes(4, "big")
    (tmp_path / "long.mp3").write_bytes(data)
    media = source(tmp_path, window_seconds=None)
    (shard,) = media.shards()
    for item in media.scan(shard):
        assert media.item_size(shard, item).num_bytes == pytest.approx(5 * 64_000, rel=0.1)
