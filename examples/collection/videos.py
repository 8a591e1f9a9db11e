"""Short videos with speech, text on a slide and a scene, and the queries that each of them answers.

    python -m examples.collection.videos data/collection/10k data/collection/videos

The first half of a passage is read on the slide, the second half is spoken.
"""

from __future__ import annotations

import json
import wave
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
from examples.collection.clips import SPEECH, run, write_slide
from examples.collection.parts import HALVES, hash64, rows_of
from pipeline.config import SpecError
from pipeline.runtime.atomic import check_writable

NUM_VIDEOS = {"en": 40, "it": 16, "da": 16, "fr": 16, "de": 16}
WORDS = range(20, 61)
SCENES = Path("jobs/data/shapes")
#: PocketSphinx recognised this voice of Flite, and hardly those of eSpeak, in a few sentences.
ENGLISH = "ffmpeg -nostdin -loglevel error -y -f lavfi -i flite=textfile={text}:voice=slt {wav}"
VIDEO = (
    "ffmpeg -nostdin -loglevel error -y -loop 1 -r 2 -t {third} -i {slide} -loop 1 -r 2 -t {rest}"
    " -i {scene} -i {wav} -filter_complex [1]scale=480:480,pad=640:480:80:0[b];[0][b]concat[v]"
    " -map [v] -map 2 -c:v libx264 -preset veryfast -pix_fmt yuv420p -ac 1 -c:a aac -b:a 48k"
    " -map_metadata -1 -fflags +bitexact -flags:a +bitexact -flags:v +bitexact -threads 1 {out}"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and writes the videos."""
    parser = jobs.parser(__doc__)
    parser.add_argument("source", metavar="SLICE", type=Path, help="folder of a slice of passages")
    parser.add_argument("folder", metavar="OUTPUT", type=Path, help="folder of the videos")
    args = parser.parse(arguments)
    if not (args.source / "corpus.jsonl").exists():
        raise SpecError("SLICE", str(args.source), "the folder of a slice of passages")
    check_writable(str(args.folder), "OUTPUT")
    write_videos(args.source, args.folder)


def write_videos(source: Path, folder: Path) -> None:
    """Writes videos, transcripts of those that are not in English, queries and judgments."""
    passages = {row["_id"]: row for row in rows_of([source / "corpus.jsonl"])}
    answers: dict[str, set[str]] = {}
    for half in HALVES:
        for line in (source / "qrels" / f"{half}.tsv").read_text().splitlines()[1:]:
            query_id, passage_id, _ = line.split("\t")
            answers.setdefault(query_id, set()).add(passage_id)
    asked: dict[str, list[dict[str, Any]]] = {}
    for query in rows_of([source / "queries.jsonl"]):
        if len(found := answers.get(query["_id"], set())) == 1:
            asked.setdefault(next(iter(found)), []).append(query)
    scenes = list(rows_of([SCENES / "queries.jsonl"]))
    counts: Counter[str] = Counter()
    queries, qrels, transcripts = [], ["query-id\tcorpus-id\tscore"], []
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name in sorted(asked, key=hash64):
        passage = passages[name]
        words, language = passage["text"].split(), passage["language"]
        latin = max(passage["text"]) < "\u0250"
        if counts[language] == NUM_VIDEOS.get(language, 0) or len(words) not in WORDS or not latin:
            continue
        number = counts.total()
        counts[language] += 1
        video = f"{language}/{hash64(name):016x}.mp4"
        path = folder / ("english" if language == "en" else "others") / video
        middle = len(words) // 2
        spoken = " ".join(words[middle:])
        _video(path, language, " ".join(words[:middle]), spoken, scenes[number]["_id"])
        if language != "en":
            transcripts.append({"id": video, "text": spoken})
        scene = {**scenes[number], "kind": "scene", "language": "en"}
        for query in [*asked[name], scene]:
            queries.append({key: query[key] for key in ("_id", "text", "kind", "language")})
            qrels.append(f"{query['_id']}\t{video}\t1")
    (folder / "qrels" / "test.tsv").write_text("\n".join([*qrels, ""]))
    for stem, rows in (("queries", queries), ("transcripts", transcripts)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{stem}.jsonl").write_text(text, encoding="utf-8")
    print(f"{folder}: {counts.total()} videos, {len(queries)} queries")


def _video(path: Path, language: str, shown: str, spoken: str, scene: str) -> None:
    """Writes a video of a slide for a third of the time and a scene for the rest, with speech."""
    path.parent.mkdir(parents=True, exist_ok=True)
    wav, slide = path.with_suffix(".wav"), path.with_suffix(".png")
    text = path.with_suffix(".txt")
    text.write_text(spoken, encoding="utf-8")
    english = ENGLISH.format(text=text, wav=wav)
    run(english if language == "en" else f"{SPEECH.format(wav=wav)} {language}", spoken)
    text.unlink()
    with wave.open(str(wav)) as audio:
        seconds = audio.getnframes() / audio.getframerate()
    write_slide(slide, shown)
    third = round(2 * seconds / 3) / 2
    image_of_scene = SCENES / "images" / f"scene-{int(scene[1:]):05}.png"
    inputs = {"slide": slide, "scene": image_of_scene, "wav": wav, "out": path}
    run(VIDEO.format(third=third, rest=seconds - third, **inputs), "")
    wav.unlink()
    slide.unlink()


if __name__ == "__main__":
    jobs.run(main)
