"""A slice of audio and video clips that speak passages of the slice 10k, with their queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from examples.collection.parts import HALVES, hash64, rows_of, slice_folder, write_summary

SOURCE, NAME = "10k", "clips"
MAX_PER_LANGUAGE = 40
#: One clip of that many is a video with the text on a slide, if the font has its characters.
VIDEO_INTERVAL = 3
#: Passages of these kinds have signs that are not spoken.
SILENT_KINDS = ("definition", "paraphrase")
PROGRAMS = ("espeak-ng", "ffmpeg")
SPEECH = "espeak-ng --stdin -s 160 -w {wav} -v"
_EXACT = "-map_metadata -1 -fflags +bitexact -flags:a +bitexact -flags:v +bitexact -threads 1"
_FFMPEG = "ffmpeg -nostdin -loglevel error -y"
AUDIO = f"{_FFMPEG} -i {{wav}} -ac 1 -c:a libmp3lame -b:a 48k {_EXACT}"
VIDEO = (
    f"{_FFMPEG} -loop 1 -r 2 -i {{slide}} -i {{wav}} -shortest -c:v libx264 -preset veryfast "
    f"-tune stillimage -pix_fmt yuv420p -ac 1 -c:a aac -b:a 48k {_EXACT}"
)
SLIDE_SIZE, FONT_SIZE, LINE_CHARACTERS = (640, 480), 20, 56


def build_clips(data: Path, say: Callable[[str], None]) -> list[str]:
    """Writes the slice `clips`, and returns a sentence if a program is not installed."""
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        names = " ".join(absent)
        sentence = f"{NAME}: {names} must be installed, on Debian by `apt-get install {names}`"
        say(f"missing {sentence}")
        return [sentence]
    passages = {row["_id"]: row for row in rows_of([data / SOURCE / "corpus.jsonl"])}
    queries = {row["_id"]: row for row in rows_of([data / SOURCE / "queries.jsonl"])}
    answers: dict[str, set[str]] = defaultdict(set)
    half_of = {}
    for half in HALVES:
        for line in (data / SOURCE / "qrels" / f"{half}.tsv").read_text().splitlines()[1:]:
            query, passage, _ = line.split("\t")
            if queries[query]["kind"] not in SILENT_KINDS:
                answers[query].add(passage)
                half_of[query] = half
    asked = {name: next(iter(found)) for name, found in answers.items() if len(found) == 1}
    voices = {voice.partition("-")[0] for voice in run("espeak-ng --voices", "").split()}
    counts: Counter[str] = Counter()
    items: dict[str, str] = {}
    with slice_folder(data, NAME) as folder:
        (folder / "items").mkdir()
        for passage in sorted(set(asked.values()), key=hash64):
            language = passages[passage]["language"]
            if language.partition("-")[0] in voices and counts[language] < MAX_PER_LANGUAGE:
                counts[language] += 1
                items[passage] = _clip(folder / "items", passages[passage])
        used = [queries[name] for name in queries if asked.get(name) in items]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in used)
        (folder / "queries.jsonl").write_text(text, encoding="utf-8")
        (folder / "qrels").mkdir()
        for half in HALVES:
            lines = [
                f"{row['_id']}\t{items[asked[row['_id']]]}\t1\n"
                for row in used
                if half_of[row["_id"]] == half
            ]
            content = "query-id\tcorpus-id\tscore\n" + "".join(lines)
            (folder / "qrels" / f"{half}.tsv").write_text(content)
        kinds = Counter(f"{half_of[row['_id']]}, {row['kind']}" for row in used)
        write_summary(folder, [passages[passage] for passage in items], dict(kinds), [])
    say(f"{data / NAME}: {len(items):,} clips, {len(used):,} queries")
    return []


def _clip(folder: Path, passage: dict[str, Any]) -> str:
    """Writes an audio or video file and returns its name."""
    key = hash64(passage["_id"])
    wav, slide = folder / "speech.wav", folder / "slide.png"
    run(f"{SPEECH.format(wav=wav)} {passage['language'].lower()}", passage["text"])
    is_video = key % VIDEO_INTERVAL == 0 and max(passage["text"]) < "\u0250"
    if is_video:
        write_slide(slide, passage["text"])
    path = folder / f"{key:016x}.{'mp4' if is_video else 'mp3'}"
    run(f"{(VIDEO if is_video else AUDIO).format(wav=wav, slide=slide)} {path}", "")
    wav.unlink()
    slide.unlink(missing_ok=True)
    return path.name


def write_slide(path: Path, text: str) -> None:
    """Writes an image of a text."""
    image = Image.new("RGB", SLIDE_SIZE, "white")
    lines = textwrap.fill(text, LINE_CHARACTERS)
    font = ImageFont.load_default(FONT_SIZE)
    ImageDraw.Draw(image).multiline_text((20, 20), lines, "black", font)
    image.save(path)


def run(command: str, text: str) -> str:
    """Runs a command with a text as its input, and returns its output."""
    return subprocess.run(
        command.split(), input=text, text=True, capture_output=True, check=True
    ).stdout
