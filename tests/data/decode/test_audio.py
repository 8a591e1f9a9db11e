"""Decoding of audio: times, sample rates, formats, and corrupted files."""

from __future__ import annotations

import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile

from pipeline.data.decode import Unreadable
from pipeline.data.decode.audio import describe, read_windows
from pipeline.data.decode.process import FILES_PER_PROCESS, DecodingProcess, Limits
from tests.media import frame_times, frequency, tone_at, tones, write_audio, write_video

RATE = {"sample_rate": 16_000}
SAMPLE = Fraction(1, 16_000)


def read(path, *windows, rate=16_000):
    return list(
        read_windows(str(path), [list(window) for window in windows], {"sample_rate": rate})
    )


def peak(process: DecodingProcess) -> int:
    """Returns the peak memory of a process, in kilobytes."""
    with open(f"/proc/{process._process.pid}/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1])


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3", "a.m4a", "a.opus", "a.mka"])
@pytest.mark.parametrize(("rate", "channels"), [(48_000, 2), (24_000, 1)])
def test_window_has_audio_of_its_time(tmp_path, name, rate, channels):
    path, samples = tmp_path / name, tones(8, rate, channels)
    if name in ("a.m4a", "a.mka"):
        write_video(path, [], audio=samples, rate=rate)
    elif name == "a.opus":
        with soundfile.SoundFile(path, "w", rate, channels, "OPUS", format="OGG") as file:
            file.write(samples)
    else:
        write_audio(path, samples, rate)
    info = describe(str(path))
    assert info["duration"] == pytest.approx(8, abs=0.1)
    assert (info["sample_rate"], info["channels"]) == (rate, channels)
    for window in read(path, (2, 4), (5, 7)):
        start = window["audio_start"]
        assert window["samples"].dtype == np.float32 and len(window["samples"]) == 32_000
        for second in (0, 1):
            samples = window["samples"][second * 16_000 + 3200 : second * 16_000 + 12_800]
            assert frequency(samples, 16_000) == pytest.approx(tone_at(start + second), abs=4)
    assert start == pytest.approx(5, abs=1e-4)


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 96_000])
def test_concatenated_windows_equal_file(tmp_path, rate):
    path = write_audio(tmp_path / "a.wav", tones(7, rate, 2), rate)
    (whole,) = read(path, (0, None))
    parts = read(path, (0, 2), (2, 4.5), (4.5, 7))
    joined = np.concatenate([part["samples"] for part in parts])
    assert len(joined) == len(whole["samples"]) == 7 * 16_000
    assert np.abs(joined - whole["samples"])[100:-100].max() < 0.01
    if rate == 16_000:
        assert np.abs(joined - tones(7)[:, 0]).max() < 1e-4


def test_channels_are_averaged(tmp_path):
    samples = tones(1, 16_000, 2)
    samples[:, 1] = 0.25
    (window,) = read(write_audio(tmp_path / "a.wav", samples), (0, None))
    assert np.abs(window["samples"] - samples.mean(axis=1)).max() < 1e-4


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.m4a", "a.mp4"])
@pytest.mark.parametrize(
    ("gains", "noise"),
    [
        ((1, -1), 0.0),
        ((1, -1), 0.05),
        ((1, -0.6), 0.01),
        ((0, 1), 0.0),
        ((1, -1, 0, 0, 0, 0), 0.0),
        ((1, -1, 0, 0, -0.5, 0.5), 0.01),
    ],
)
def test_opposite_channels_do_not_cancel(tmp_path, name, gains, noise):
    rate = 48_000
    samples = tones(5, rate) * np.array(gains, np.float32)
    samples += np.random.default_rng(0).normal(0, noise, samples.shape).astype(np.float32)
    path, times = tmp_path / name, frame_times(5, 5) if name == "a.mp4" else []
    if name in ("a.wav", "a.flac"):
        write_audio(path, samples, rate)
    else:
        write_video(path, times, audio=samples, rate=rate)
    (window,) = read(path, (0, None))
    assert has_tones(window["samples"])
    level = 0.5 * np.abs(gains).mean()
    assert np.percentile(np.abs(window["samples"]), 95) == pytest.approx(level, rel=0.2)


def test_channels_may_be_opposite_at_times(tmp_path):
    samples = tones(12, 16_000, 2)
    samples[4 * 16_000 : 8 * 16_000, 1] *= -1
    (window,) = read(write_audio(tmp_path / "a.wav", samples), (0, None))
    assert has_tones(window["samples"])


def test_stereo_is_averaged(tmp_path):
    samples = np.random.default_rng(0).normal(0, 0.2, (5 * 16_000, 2))
    samples[:, 1] -= 0.3 * samples[:, 0]
    soundfile.write(tmp_path / "a.wav", samples, 16_000, subtype="FLOAT")
    (window,) = read(tmp_path / "a.wav", (0, None))
    assert np.abs(window["samples"] - samples.mean(axis=1)).max() < 1e-6


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -3e38])
@pytest.mark.parametrize("name", ["a.wav", "a.mka"])
def test_samples_are_finite(tmp_path, name, value):
    rate, path = 44_100, tmp_path / name
    samples = 0.5 * tones(6, rate, 2)
    samples[[100, 3 * rate, 5 * rate], 0] = value  # the second at the border of the windows
    if name == "a.wav":
        soundfile.write(path, samples, rate, subtype="FLOAT")
    else:
        write_video(path, [], audio=samples, rate=rate, audio_codec="pcm_f32le")
    settings = RATE | {"border_shift": 1.0}
    parts = [w["samples"] for w in read_windows(str(path), [[0, 3], [3, None]], settings)]
    assert len(np.concatenate(parts)) == 6 * 16_000
    assert np.abs(np.concatenate(parts)).max() < 0.3
    soundfile.write(tmp_path / "b.wav", np.full((8000, 1), value), 16_000, subtype="FLOAT")
    (window,) = read(tmp_path / "b.wav", (0, None))
    assert len(window["samples"]) == 8000 and not window["samples"].any()


def test_samples_of_unscaled_integers_are_unchanged(tmp_path):
    samples = np.round(tones(1) * 2.0**31).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", samples, 16_000, subtype="FLOAT")
    (window,) = read(tmp_path / "a.wav", (0, None))
    assert np.array_equal(window["samples"], samples[:, 0])


def test_silence_is_valid_audio(tmp_path):
    (window,) = read(write_audio(tmp_path / "a.wav", np.zeros((8000, 1))), (0, None))
    assert len(window["samples"]) == 8000 and not window["samples"].any()


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3", "a.mka"])
def test_duration_of_truncated_file(tmp_path, name):
    path, samples = tmp_path / name, tones(8, 16_000)
    samples += np.random.default_rng(0).normal(0, 0.01, samples.shape).astype(np.float32)
    if name == "a.mka":
        write_video(path, [], audio=samples)
    else:
        write_audio(path, samples)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    duration = describe(str(path))["duration"]
    assert 2 < duration < 6
    (window,) = read(path, (1, 2))
    assert frequency(window["samples"][3200:12_800], 16_000) == pytest.approx(tone_at(1.0), abs=4)
    (behind,) = read(path, (7, 8))
    assert isinstance(behind, Unreadable) and behind.reason == "nothing in this window"


def test_header_with_too_long_duration(tmp_path):
    path = write_audio(tmp_path / "a.wav", tones(2))
    data = bytearray(path.read_bytes())
    data[40:44] = struct.pack("<I", 100 * len(data))  # the declared length of the data
    path.write_bytes(data)
    assert describe(str(path))["duration"] == pytest.approx(2)


def with_number(path, name, offset, number, order="little", size=4):
    """Returns a copy of a file with another number at an offset."""
    data = bytearray(path.read_bytes())
    data[offset : offset + size] = number.to_bytes(size, order)
    copy = path.with_name(name)
    copy.write_bytes(data)
    return copy


def has_tones(samples, start=0, period=20):
    """Checks the tone of each second of decoded audio."""
    seconds = range(round(len(samples) / 16_000 - 0.3))
    parts = [samples[16_000 * second + 4800 :][:6400] for second in seconds]
    found = [frequency(part, 16_000) for part in parts]
    return found == pytest.approx([tone_at((start + s) % period) for s in seconds], abs=4)


def is_complete(path, seconds):
    """Checks the audio of a file, whole and in windows whose borders are in pauses."""
    info = describe(str(path))
    assert info["duration"] == pytest.approx(seconds, abs=0.1) and "truncated" not in info
    settings = RATE | {"border_shift": 0.3}
    windows = [[0, 2.5], [2.5, info["duration"]], [0, None]]
    first, last, whole = read_windows(str(path), windows, settings)
    joined = np.concatenate([first["samples"], last["samples"]])
    for samples in (joined, whole["samples"]):
        assert len(samples) == pytest.approx(16_000 * seconds, abs=1600)
    return has_tones(joined) and has_tones(whole["samples"])


@pytest.mark.parametrize("stated", [0, 1, 3 * 16_000])
def test_flac_header_with_wrong_length(tmp_path, stated):
    path = write_audio(tmp_path / "a.flac", tones(11))
    wrong = with_number(path, "b.flac", 22, stated, "big")  # of samples; 0: unknown
    assert is_complete(wrong, 11)


@pytest.mark.parametrize("riff", [0, 36, None, 0xFFFFFFFF])
@pytest.mark.parametrize("data", [0, 0xFFFFFFFF])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "ULAW"])
def test_wav_header_without_length(tmp_path, riff, data, subtype):
    soundfile.write(tmp_path / "a.wav", tones(4), 16_000, subtype=subtype)
    offset = (tmp_path / "a.wav").read_bytes().index(b"data") + 4
    path = with_number(tmp_path / "a.wav", "b.wav", offset, data)
    path = path if riff is None else with_number(path, "c.wav", 4, riff)
    assert is_complete(path, 4)
    (expected,), (found,) = read(tmp_path / "a.wav", (1, 3)), read(path, (1, 3))
    assert np.array_equal(expected["samples"], found["samples"])


def test_rf64_header_without_length(tmp_path):
    soundfile.write(tmp_path / "a.wav", tones(4), 16_000, format="RF64", subtype="PCM_16")
    offset = (tmp_path / "a.wav").read_bytes().index(b"ds64") + 8
    assert is_complete(with_number(tmp_path / "a.wav", "b.wav", offset, 0, size=24), 4)


def test_mp3_header_with_wrong_length(tmp_path):
    path = write_audio(tmp_path / "a.mp3", tones(6, 44_100), 44_100)
    offset = path.read_bytes().index(b"Xing") + 8
    for stated in (0, 1, 50):
        assert is_complete(with_number(path, "b.mp3", offset, stated, "big"), 6)
    longer = with_number(path, "b.mp3", offset, 100_000, "big")
    info = describe(str(longer))
    assert info["duration"] == pytest.approx(6, abs=0.1) and info["truncated"]


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize("pause_first", [False, True])
def test_mp3_without_length(tmp_path, mode, pause_first):
    samples, kind = tones(20, 44_100), {"format": "MP3", "bitrate_mode": mode}
    samples[slice(10 * 44_100) if pause_first else slice(10 * 44_100, None)] = 0
    with soundfile.SoundFile(
        tmp_path / "a.mp3", "w", 44_100, 1, compression_level=0.5, **kind
    ) as f:
        f.write(samples)
    with av.open(str(tmp_path / "a.mp3")) as container:
        first = next(packet.pos for packet in container.demux(audio=0))
    (tmp_path / "b.mp3").write_bytes((tmp_path / "a.mp3").read_bytes()[first:])
    (expected,), (found,) = read(tmp_path / "a.mp3", (0, None)), read(tmp_path / "b.mp3", (0, None))
    assert describe(str(tmp_path / "b.mp3")).keys() == {"duration", "sample_rate", "channels"}
    assert len(found["samples"]) == pytest.approx(len(expected["samples"]), abs=1600)


ID3 = b"ID3\4\0\0\0\0\2\0" + bytes(256)


@pytest.mark.parametrize(
    ("name", "between"),
    [
        *((f"a.{suffix}", b"") for suffix in ("mp3", "ogg", "opus", "flac", "wav", "aac")),
        *(("a.mp3", tag) for tag in (ID3, b"TAG" + bytes(125))),
        ("a.aac", ID3),
    ],
)
def test_joined_files(tmp_path, name, between):
    samples, path, parts = tones(18, 48_000), tmp_path / name, []
    for first in range(0, len(samples), 6 * 48_000):
        part = samples[first : first + 6 * 48_000]
        if name == "a.aac":
            write_video(path, [], audio=part, rate=48_000)
        elif name == "a.opus":
            soundfile.write(path, part, 48_000, "OPUS", format="OGG")
        else:
            write_audio(path, part, 48_000)
        parts.append(path.read_bytes())
    path.write_bytes(between.join(parts))
    info = describe(str(path))
    assert info["duration"] == pytest.approx(18, abs=0.5) and "truncated" not in info
    windows = read(path, (0, 7), (11, 16), (14, 17.8))
    for window, start, end in zip(windows, (0, 11, 14), (7, 16, 17.8), strict=True):
        assert window["audio_start"] == pytest.approx(start, abs=0.1)
        assert len(window["samples"]) == pytest.approx(16_000 * (end - start), abs=1600)
        assert has_tones(window["samples"], start)


def test_joined_files_without_length(tmp_path):
    samples = tones(9)
    parts = [write_audio(tmp_path / f"{n}.flac", samples[n * 48_000 :][:48_000]) for n in range(3)]
    unknown = [with_number(path, f"b-{path.name}", 22, 0, "big") for path in parts]
    path = tmp_path / "a.flac"
    for joined in (unknown, [parts[0], unknown[1], parts[2]]):
        path.write_bytes(b"".join(part.read_bytes() for part in joined))
        assert is_complete(path, 9)


@pytest.mark.parametrize("name", ["a.mp3", "a.ogg", "a.flac", "a.wav"])
def test_joined_files_may_differ(tmp_path, name):
    parts = [(tones(4), 16_000), (tones(4, 44_100, 2), 44_100), (tones(4, 24_000), 24_000)]
    path, data = tmp_path / name, b""
    for samples, rate in parts:
        data += write_audio(path, samples, rate).read_bytes()
    path.write_bytes(data)
    (window,) = read(path, (0, None))
    assert len(window["samples"]) == pytest.approx(12 * 16_000, abs=4800)
    assert has_tones(window["samples"], period=4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"Dear Ada, this is text.", "not audio"),
        (b"RIFF\x00\x00\x00\x00WAVEnothing", "corrupted audio"),
        (b"\x00\x00\x00\x20ftypM4A nothing that can be played", "corrupted audio"),
    ],
)
def test_invalid_audio(tmp_path, content, reason):
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(Unreadable) as error:
        describe(str(tmp_path / "a.wav"))
    assert error.value.reason == reason


def test_header_without_samples(tmp_path):
    with pytest.raises(Unreadable, match="no sound"):
        describe(str(write_audio(tmp_path / "a.wav", np.zeros((0, 1)))))


def test_video_with_audio_suffix(tmp_path):
    video = write_video(tmp_path / "a.mp4", [0, 0.5, 1], audio=tones(3))
    assert describe(str(video.rename(tmp_path / "a.m4a")))["duration"] == pytest.approx(3, abs=0.1)
    silent = write_video(tmp_path / "b.mp4", [0, 0.5, 1])
    with pytest.raises(Unreadable, match="no audio track"):
        describe(str(silent.rename(tmp_path / "b.m4a")))


def test_track_that_starts_late(tmp_path):
    late = write_video(tmp_path / "a.mp4", frame_times(7, 10), audio=tones(4), audio_start=3.0)
    (window,) = read(late, (2, 6))
    assert window["audio_start"] == pytest.approx(3, abs=0.1)
    assert len(window["samples"]) == pytest.approx(3 * 16_000, abs=1600)


def test_gap_in_track_is_silence(tmp_path):
    path = tmp_path / "a.mka"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for second in (0, 1, 4, 5):
            samples = np.full((1, 16_000), 8000 + 1000 * second, np.int16)
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16_000, 16_000 * second, SAMPLE
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert describe(str(path))["duration"] == pytest.approx(6)
    whole, part, pause = read(path, (0, 6), (3.5, 5), (2.5, 3.5))
    levels = [round(float(x) * 32_768) for x in whole["samples"][8000::16_000]]
    assert levels == [8000, 9000, 0, 0, 12_000, 13_000]
    assert part["audio_start"] == pytest.approx(4)
    assert len(part["samples"]) == 16_000 and part["samples"].min() > 0.3
    assert isinstance(pause, Unreadable)


def test_process_is_replaced_after_many_files(tmp_path):
    path = str(write_audio(tmp_path / "a.wav", tones(1)))
    process = DecodingProcess("audio", Limits())
    process.call("describe", path)
    first = process._process.pid
    process.call("describe", path)
    assert process._process.pid == first
    process._num_requests = FILES_PER_PROCESS
    assert process.call("describe", path)["duration"] == 1
    assert process._process.pid != first
    process.stop()


@pytest.mark.parametrize("name", ["a.wav", pytest.param("a.m4a", marks=pytest.mark.heavy)])
def test_memory_is_independent_of_duration(tmp_path, name):
    peaks = []
    for seconds in (60, 180):
        path, samples = tmp_path / f"{seconds}{name}", tones(seconds)
        write_audio(path, samples) if name == "a.wav" else write_video(path, [], audio=samples)
        process = DecodingProcess("audio", Limits())
        windows = [[start, start + 30] for start in range(0, seconds, 30)]
        for window in process.stream(len(windows), "read_windows", str(path), windows, RATE):
            assert len(window["samples"]) == pytest.approx(30 * 16_000, abs=1600)
        peaks.append(peak(process))
        process.stop()
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.m4a"])
def test_windows_start_and_end_in_pauses(tmp_path, name):
    samples = 0.2 * tones(24)
    samples[: 16_000 * 24] += np.random.default_rng(0).normal(0, 1e-3, samples.shape)
    for pause in (7.2, 13.5, 16.1):  # pauses of 0.6 s with low noise
        samples[round(16_000 * pause) : round(16_000 * (pause + 0.6))] *= 0.01
    path = tmp_path / name
    write_video(path, [], audio=samples) if name == "a.m4a" else write_audio(path, samples)
    windows = [[0.0, 8.0], [8.0, 16.0], [16.0, 24.0]]
    settings = RATE | {"border_shift": 2.0}
    read = list(read_windows(str(path), windows, settings))
    starts = [window["audio_start"] for window in read]
    assert starts == pytest.approx([0.0, 7.5, 16.4], abs=0.15)
    ends = [w["audio_start"] + len(w["samples"]) / 16_000 for w in read]
    assert ends[:2] == pytest.approx(starts[1:], abs=1e-4)  # no overlaps and no gaps
    (alone,) = read_windows(str(path), windows[1:2], settings)
    assert (alone["audio_start"], len(alone["samples"])) == (starts[1], len(read[1]["samples"]))


def test_borders_are_unchanged_without_pauses(tmp_path):
    path = write_audio(tmp_path / "a.wav", tones(10))
    first, second = read_windows(str(path), [[0, 5], [5, 10]], RATE | {"border_shift": 1.0})
    assert len(first["samples"]) == len(second["samples"]) == 80_000


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.mp3", "a.m4a"])
def test_truncated_audio_is_marked(tmp_path, name):
    path = tmp_path / name
    if name == "a.m4a":
        write_video(path, [], audio=tones(20), options={"movflags": "faststart"})
    else:
        write_audio(path, tones(20))
    assert "truncated" not in describe(str(path))
    path.write_bytes(path.read_bytes()[: int(0.6 * path.stat().st_size)])
    assert describe(str(path))["truncated"] is True
    (window,) = read(path, (0, 20))
    assert window["info"]["truncated"] is True
