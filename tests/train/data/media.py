"""Small video data on disk, in the formats of MSR-VTT and MultiVENT 2.0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import media
from tests.media import frame_times, tones, write_video
from tests.train.data.files import write_lines


def write_clip(path: Path, seconds: int = 2, has_audio: bool = True) -> Path:
    """Writes a video with small frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    audio = tones(seconds) if has_audio else None
    return write_video(path, frame_times(seconds, 4), size=(64, 48), audio=audio)


def write_audio(path: Path, seconds: float = 2) -> Path:
    """Writes an audio file of tones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return media.write_audio(path, tones(seconds))


def write_msrvtt(folder: Path, trained: int = 4, tested: int = 2, has_audio: bool = True) -> Path:
    """Writes videos with two sentences each; the last `tested` are the test set."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = [f"video{number}" for number in range(trained + tested)]
    for name in ids:
        write_clip(folder / f"videos/{name}.mp4", has_audio=has_audio)
    value = {
        "info": {"year": "2016"},
        "videos": [
            {
                **{"id": number, "video_id": name, "category": 9, "url": "https://x/?v=a"},
                **{"start time": 1.0, "end time": 9.5},
                "split": "train" if number < trained else "test",
            }
            for number, name in enumerate(ids)
        ],
        "sentences": [
            {"sen_id": 2 * number + i, "video_id": name, "caption": f"{words} {number}"}
            for number, name in enumerate(ids)
            for i, words in enumerate(("a car drives", "somebody sings"))
        ],
    }
    (folder / "MSRVTT_data.json").write_text(json.dumps(value))
    (folder / "MSRVTT_train.9k.csv").write_text("\n".join(["video_id", *ids[:trained]]) + "\n")
    rows = [f'ret{n},msr{n},{name},"a car, red"' for n, name in enumerate(ids[trained:])]
    text = "\n".join(["key,vid_key,video_id,sentence", *rows])
    (folder / "MSRVTT_JSFUSION_test.csv").write_text(text + "\n")
    return folder


QUERY = "internvid_korean_political_pov_base_{}"


def write_multivent(folder: Path, number: int = 4, judgments: Sequence[Any] = ()) -> Path:
    """Writes queries with one video each in two shards, with two videos, and with none."""
    ids = [f"aB3_dE-fG1{i}" for i in range(number)]
    for i, name in enumerate(ids):
        write_clip(folder / f"train/00000{i % 2}/{name}.mp4", has_audio=bool(i % 2))
    texts = [f'"Vote {i}, spring 2021"' for i in range(number)]
    texts += ["both of the first", "nobody knows"]
    rows = [f"{QUERY.format(i)},{text}" for i, text in enumerate(texts)]
    queries = "\r\n".join(["Query_id,query", *rows]) + "\r\n"
    (folder / "multivent_2_train_queries.csv").write_bytes(queries.encode())
    pairs = [*enumerate(ids), (number, ids[0]), (number, ids[1])]
    write_lines(
        folder / "multivent_2_train_judgments.jsonl",
        [
            *({"query_id": QUERY.format(q), "doc_id": i, "relevance": 1} for q, i in pairs),
            *judgments,
        ],
    )
    return folder
