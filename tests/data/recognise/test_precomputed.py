"""Precomputed transcripts: JSON lines, MultiVENT CSV files, and malformed files."""

import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import fsspec
import pytest

from pipeline.config import SpecError
from pipeline.data.recognise import precomputed
from pipeline.data.recognise.precomputed import (
    MAX_ARCHIVE_DEPTH,
    Precomputed,
    PrecomputedSpeech,
    PrecomputedText,
)
from pipeline.registry import OCR, SPEECH
from pipeline.tokens import AUDIO, TEXT
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch) -> Path:
    """An empty temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def spec(path, **fields) -> Precomputed.Spec:
    return Precomputed.Spec(path=str(path), **fields)


def write(path: Path, *entries) -> Path:
    lines = (e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def texts(recogniser: Precomputed, item_id: str, **fields) -> list[str]:
    return [line.text for line in recogniser.lines({"item_id": item_id, **fields})]


def window(start: float, end: float, unit: str = "seconds") -> dict:
    span = {"unit": unit, "start": start, "end": end}
    return {"item_id": f"v.mp4#{start}", "parent_id": "v.mp4", "span": span}


# -- JSON lines ------------------------------------------------------------------------------


def test_lines_have_boxes_and_times(tmp_path):
    path = write(
        tmp_path / "ocr.jsonl",
        {"id": "a", "text": "Delta", "box": [0, 0.5, 0.25, 1], "start": 1, "end": 2.5},
        "",
        {"id": "b", "text": " two  words ", "start": 0, "end": 8, "confidence": 0.5},
        {"id": "a", "text": "wing", "box": None},
        {"id": "c", "text": ""},
    )
    recogniser = PrecomputedText(spec(path))
    first, second = recogniser.lines({"item_id": "a"})
    (delta,), (wing,) = first.words, second.words
    assert (delta.text, delta.box, delta.times, delta.kind) == (
        *("Delta", (0, 0.5, 0.25, 1), (1, 2.5)),
        TEXT,
    )
    assert wing.text == "wing" and all(map(math.isnan, (*wing.box, *wing.times)))
    (line,) = PrecomputedSpeech(spec(path)).lines({"item_id": "b"})
    assert [(w.text, w.times, w.kind) for w in line.words] == [
        ("two", (0, 3), AUDIO),
        ("words", (3, 8), AUDIO),
    ]
    assert texts(recogniser, "c") == texts(recogniser, "unknown") == []


def test_sentences_belong_to_window_of_their_middle(tmp_path):
    path = write(
        tmp_path / "asr.jsonl",
        {"id": "v.mp4", "text": "before", "start": 3, "end": 4},
        {"id": "v.mp4", "text": "ten tons", "start": 8, "end": 13},
        {"id": "v.mp4", "text": "long hour", "start": 4, "end": 16},
        {"id": "v.mp4", "text": "whole"},
        {"id": "v.mp4#20", "text": "its own", "start": 900, "end": 901},
    )
    speech = PrecomputedSpeech(spec(path))
    results = {
        start: [x.text for x in speech.lines(window(start, start + 10))] for start in (0, 10)
    }
    assert results == {0: ["before", "long", "whole"], 10: ["ten tons", "hour"]}
    assert [x.text for x in speech.lines(window(20, 30))] == ["its own"]
    assert texts(speech, "v.mp4", parent_id="v.mp4") == ["before", "ten tons", "long hour", "whole"]
    pages = [len(speech.lines(window(number, number, "page"))) for number in (1, 2)]
    assert pages == [4, 0]


def test_min_confidence(tmp_path):
    path = write(
        tmp_path / "asr.jsonl",
        {"id": "a", "text": "good evening", "confidence": 0.75},
        {"id": "a", "text": "lovely", "confidence": 0.1},
        {"id": "a", "text": "unknown"},
    )
    words = [
        w for line in PrecomputedSpeech(spec(path)).lines({"item_id": "a"}) for w in line.words
    ]
    assert [word.confidence for word in words[:3]] == [0.75, 0.75, 0.1]
    assert math.isnan(words[3].confidence)
    filtered = PrecomputedSpeech(spec(path, min_confidence=0.5))
    assert texts(filtered, "a") == ["good evening", "unknown"]


def test_repeated_words_are_kept(tmp_path):
    word = {"id": "a", "text": "very"}
    timed = {**word, "start": 1, "end": 2}
    path = write(tmp_path / "asr.jsonl", word, word, timed, timed)
    assert texts(PrecomputedSpeech(spec(path)), "a") == ["very"] * 3


def test_unstorable_characters_are_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "te\0xt": "one\\u0000 \\ud800 two"}\r\n\0\n')
    assert texts(PrecomputedText(spec(path)), "a") == ["one ? two"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not UTF-8 JSON"),
        ("[1]", "is not a JSON object"),
        ({"text": "x"}, "has no id"),
        ({"id": 7, "text": "x"}, "has the id 7"),
        ({"id": "a"}, "has no text"),
        ({"id": "a", "text": ["x"]}, "has the text ['x']"),
        ({"id": "a", "text": "x", "box": [0, 0, 1]}, "has the box [0, 0, 1]"),
        ({"id": "a", "text": "x", "box": [0, 0, 640, 480]}, "has the box [0, 0, 640, 480]"),
        ({"id": "a", "text": "x", "box": [0.5, 0, 0.1, 1]}, "has the box [0.5, 0, 0.1, 1]"),
        ({"id": "a", "text": "x", "start": 1}, "has the start 1 and the end None"),
        ({"id": "a", "text": "x", "start": 2, "end": 1}, "has the start 2 and the end 1"),
        ('{"id": "a", "text": "x", "start": 0, "end": NaN}', "has the start 0 and the end nan"),
        (
            {"id": "a", "text": "x", "start": 0, "end": 1 << 64},
            f"has the start 0 and the end {1 << 64}",
        ),
        ('{"id": "a", "text": "x", "deep": ' + "[" * 100_000, "is not UTF-8 JSON"),
        ({"id": "a", "text": "x", "confidence": 1.5}, "has the confidence 1.5"),
        ({"id": "a", "text": "x", "confidence": "high"}, "has the confidence 'high'"),
    ],
)
def test_error_names_invalid_line(tmp_path, tables, line, problem):
    path = write(tmp_path / "asr.jsonl", {"id": "a", "text": "fine"}, line)
    with pytest.raises(SpecError) as raised:
        PrecomputedText.check(spec(path))
    assert str(raised.value).startswith('path must be a line {"id": "...", "text": "..."}')
    assert str(raised.value).endswith(f"got '{path}:2', which {problem}")
    assert [file.suffix for file in tables.rglob("*.*")] == [".lock"]


def test_unmatched_ids(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"id": f"id-{i}", "text": "x"} for i in range(9)))
    assert PrecomputedText.find_unmatched(spec(path), iter(["id-0", "id-8", "id-8", "other"])) == (
        7,
        [f"id-{i}" for i in range(1, 6)],
    )
    known = [f"id-{i}" for i in range(9)]
    assert PrecomputedText.find_unmatched(spec(path), known) == (0, [])


# -- MultiVENT -------------------------------------------------------------------------------

PADDLE = "video_id,image_id,ocr_nbr,bbox,text\r\n"
SPEECH_FILES = {
    "asr/speech_to_text/000003/247.m4a.csv": "video_id,text\n000003/247.m4a,good evening\n",
    "asr/speech_to_text/000003/248.m4a.csv": "",
    "asr/speech_to_text/000003/249.m4a.csv": "video_id,text\n",
    "asr/speech_to_text/000003/250.m4a.csv": 'video_id,text\n000003/250.m4a,"so, ""he\nsaid""\0"\n',
}
TEXT_FILES = {
    "000003/247.mp4_frames/247_frame_0.png.csv": PADDLE
    + '000003/247.mp4,0,0,"[[1, 2], [30, 2], [30, 9], [1, 9]]",NEWS\r\n'
    + "000003/247.mp4,0,1,[],ten\0 o'clock\r\n",
    "000003/247.mp4_frames/247_frame_100.png.csv": PADDLE + "000003/247.mp4,100,0,[],NEWS\r\n",
    "000003/247.mp4_frames/247_frame_50.png.csv": PADDLE + "000003/247.mp4,50,0,[],NEWS\r\n",
    "000003/247.mp4_frames/247_frame_150.png.csv": PADDLE,
    "aB3_dE-fG12.mp4_frames/aB3_dE-fG12_frame_2.png.csv": "text\nsöme text\n",
}


def tar(files: dict[str, bytes | str], mode: str = "w:gz") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:
        for name, content in files.items():
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def zipped(files: dict[str, bytes | str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def folder(files: dict[str, bytes | str], path: Path) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture(params=["folder", "tar", "tar.gz", "zip", "tar.gz in zip", "zip in tar"])
def both(request, tmp_path) -> Path:
    """Speech and text files in a folder or one of the supported archives."""
    files = {**SPEECH_FILES, **TEXT_FILES}
    match request.param:
        case "folder":
            return folder(files, tmp_path / "csv")
        case "tar":
            name, data = "a.tar", tar(files, "w")
        case "tar.gz":
            name, data = "a.tar.gz", tar(files)
        case "zip":
            name, data = "a.zip", zipped(files)
        case "tar.gz in zip":
            parts = {"speech.tar.gz": tar(SPEECH_FILES), "text.tar.gz": tar(TEXT_FILES)}
            name, data = "a.zip", zipped(parts)
        case "zip in tar":
            name, data = "a.tar", tar({"readme.txt": "hello", "a.zip": zipped(files)})
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def test_multivent_archives(both):
    speech = PrecomputedSpeech(spec(both))
    assert texts(speech, "247") == texts(speech, "test/000003/247.mp4") == ["good evening"]
    assert texts(speech, "248") == texts(speech, "249") == []
    assert texts(speech, "250") == ['so, "he said"']
    (line,) = speech.lines(window(0, 10) | {"parent_id": "x/247.mp4"})
    assert line.words[0].kind == AUDIO and math.isnan(line.words[0].times[0])
    assert speech.lines(window(10, 20) | {"parent_id": "x/247.mp4"}) == []

    text = PrecomputedText(spec(both))
    assert texts(text, "247") == ["NEWS", "ten o'clock"]
    assert texts(text, "aB3_dE-fG12") == ["söme text"]
    (word,) = text.lines({"item_id": "247"})[0].words
    assert word.kind == TEXT and all(map(math.isnan, (*word.box, *word.times)))


def test_frame_times_require_fps(tmp_path):
    text = PrecomputedText(spec(folder(TEXT_FILES, tmp_path / "csv")))
    item = {"item_id": "247", "metadata": '{"fps": 25}'}
    results = [(line.text, line.words[0].times) for line in text.lines(item)]
    assert results == [("NEWS", (0, 5)), ("ten o'clock", (0, 1))]


def test_video_in_two_archives(tmp_path):
    more = "000003/247.m4a.csv", "video_id,text\n000003/247.m4a,and good night\n"
    (tmp_path / "a.tar.gz").write_bytes(tar(SPEECH_FILES))
    (tmp_path / "b.tar.gz").write_bytes(tar(SPEECH_FILES | {more[0]: more[1]}))
    speech = PrecomputedSpeech(spec(tmp_path, form="multivent"))
    assert texts(speech, "247") == ["good evening", "and good night"]


def test_multivent_ids_match_by_name(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar(SPEECH_FILES, "w"))
    known = ["000003/247.mp4", "000003/248.mp4", "249"]
    assert PrecomputedSpeech.find_unmatched(spec(tmp_path), known) == (1, ["250"])


def test_hours_of_speech_in_one_field(tmp_path):
    long = "word " * 100_000
    path = write(tmp_path / "1.m4a.csv", "video_id,text", f'0/1.m4a,"{long}"')
    (line,) = PrecomputedSpeech(spec(path)).lines({"item_id": "1"})
    assert len(line.words) == 100_000


# -- files -----------------------------------------------------------------------------------


def test_errors_name_unreadable_files(tmp_path):
    with pytest.raises(SpecError, match="does not exist"):
        PrecomputedText.check(spec(tmp_path / "nothing.jsonl"))
    write(tmp_path / "readme.txt", "hello")
    with pytest.raises(SpecError, match="which contains no such file"):
        PrecomputedText.check(spec(tmp_path))
    (tmp_path / "a.tar.gz").write_bytes(tar(SPEECH_FILES)[:-100])
    with pytest.raises(
        SpecError,
        match=r"must be a readable file, got .*a\.tar\.gz.* cannot"
        r" be read ",
    ):
        PrecomputedSpeech.check(spec(tmp_path))
    (tmp_path / "a.tar.gz").unlink()
    (tmp_path / "b.zip").write_bytes(b"PK")
    with pytest.raises(SpecError, match=r"b\.zip.* cannot be read"):
        PrecomputedSpeech.check(spec(tmp_path))
    path = write(tmp_path / "other.csv", "id,caption", "a,b")
    with pytest.raises(
        SpecError,
        match=r"text, got '.*other\.csv', which has the columns id,"
        r" caption",
    ):
        PrecomputedSpeech.check(spec(path))


def check_error(path: Path, kind: type[Precomputed] = PrecomputedText) -> str:
    with pytest.raises(SpecError) as raised:
        kind.check(spec(path))
    return str(raised.value)


def test_malicious_files_are_rejected(tmp_path, monkeypatch):
    inner = {"a.jsonl": '{"id": "a", "text": "x"}'}
    for _ in range(MAX_ARCHIVE_DEPTH - 1):
        inner = {"a.zip": zipped(inner)}
    (tmp_path / "a.zip").write_bytes(zipped(inner))
    PrecomputedText.check(spec(tmp_path / "a.zip"))
    for _ in range(100):
        inner = {"a.zip": zipped(inner)}
    (tmp_path / "a.zip").write_bytes(zipped(inner))
    assert "an archive nested at most 4 deep, got " in check_error(tmp_path / "a.zip")

    monkeypatch.setattr(precomputed, "MAX_LINE_BYTES", 4_096)
    content = '{"id": "a", "text": "' + "x" * 5_000 + '"}'
    (tmp_path / "a.tar.gz").write_bytes(tar({"b.jsonl": content}))
    assert "b.jsonl:1', which is longer" in check_error(tmp_path / "a.tar.gz")
    write(tmp_path / "1.m4a.csv", "video_id,text", "0/1.m4a," + "x" * 5_000)
    assert "1.m4a.csv:2', which is longer" in check_error(tmp_path / "1.m4a.csv", PrecomputedSpeech)
    row = '0/1.m4a,"' + "x\n" * 5_000 + '"'
    write(tmp_path / "1.m4a.csv", "video_id,text", row)
    assert "field larger than" in check_error(tmp_path / "1.m4a.csv", PrecomputedSpeech)

    member = tarfile.TarInfo("a.jsonl")
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(50 << 30)}
    (tmp_path / "a.tar").write_bytes(member.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    assert "which is a sparse file" in check_error(tmp_path / "a.tar")


def test_special_files_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")  # opening it would wait for a writer
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl"):
        assert "must be a regular file, got " in check_error(path)


def test_form(tmp_path):
    path = write(tmp_path / "words.txt", {"id": "a", "text": "any name"})
    assert texts(PrecomputedText(spec(path, form="jsonl")), "a") == ["any name"]
    write(tmp_path / "words.jsonl", {"id": "a", "text": "lines"})
    write(tmp_path / "a.m4a.csv", "video_id,text", "a.m4a,columns")
    assert texts(PrecomputedSpeech(spec(tmp_path, form="jsonl")), "a") == ["lines"]
    assert texts(PrecomputedSpeech(spec(tmp_path, form="multivent")), "a") == ["columns"]
    assert texts(PrecomputedSpeech(spec(tmp_path)), "a") == ["columns", "lines"]


def test_other_file_systems():
    with fsspec.open("memory://transcripts/a.jsonl", "w") as file:
        file.write('{"id": "a", "text": "far away"}')
    assert texts(PrecomputedText(spec("memory://transcripts")), "a") == ["far away"]


def test_changed_files_are_read_again(tmp_path):
    path = write(tmp_path / "a.jsonl", {"id": "a", "text": "old"})
    assert texts(PrecomputedText(spec(path)), "a") == ["old"]
    write(path, {"id": "a", "text": "newer"})
    assert texts(PrecomputedText(spec(path)), "a") == ["newer"]


def test_processes_share_one_table(tmp_path, tables):
    lines = ({"id": f"id-{i}", "text": f"text {i}"} for i in range(20_000))
    path = write(tmp_path / "a.jsonl", *lines)
    # New processes, because forks of a process with threads may deadlock.
    code = """
import sys
from pipeline.registry import OCR
ocr = OCR.build(OCR.resolve({"name": "precomputed", "path": sys.argv[1]}))
(line,) = ocr.lines({"item_id": "id-9999"})
print(line.text)
"""
    command = [sys.executable, "-c", code, str(path)]
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=240)[0] for process in processes] == ["text 9999\n"] * 3
    assert len(list(tables.rglob("*.sqlite"))) == 1
    assert not list(tables.rglob("*.tmp"))


@pytest.mark.parametrize("registry", [OCR, SPEECH])
def test_wants_nothing(registry, tmp_path):
    resolved = registry.resolve({"name": "precomputed", "path": str(tmp_path)})
    assert registry.load("precomputed").wants(resolved) == ()
