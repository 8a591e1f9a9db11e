"""Small data of videos on disk, in the forms of MSR-VTT and MultiVENT 2.0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.media import every, tones, write_sound, write_video
from tests.training_data.files import lines


def clip(path: Path, seconds: int = 2, has_sound: bool = True) -> Path:
    """A video of a small picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sound = tones(seconds) if has_sound else None
    return write_video(path, every(seconds, 4), size=(64, 48), sound=sound)


def sound(path: Path, seconds: float = 2) -> Path:
    """A file of tones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_sound(path, tones(seconds))


def msrvtt(folder: Path, trained: int = 4, tested: int = 2, has_sound: bool = True) -> Path:
    """Videos with two sentences each, the last of which are in the list of tests."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = [f"video{number}" for number in range(trained + tested)]
    for name in ids:
        clip(folder / f"videos/{name}.mp4", has_sound=has_sound)
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
            {"sen_id": 2 * number + own, "video_id": name, "caption": f"{words} {number}"}
            for number, name in enumerate(ids)
            for own, words in enumerate(("a car drives", "somebody sings"))
        ],
    }
    (folder / "MSRVTT_data.json").write_text(json.dumps(value))
    (folder / "MSRVTT_train.9k.csv").write_text("\n".join(["video_id", *ids[:trained]]) + "\n")
    rows = [f'ret{n},msr{n},{name},"a car, red"' for n, name in enumerate(ids[trained:])]
    text = "\n".join(["key,vid_key,video_id,sentence", *rows])
    (folder / "MSRVTT_JSFUSION_test.csv").write_text(text + "\n")
    return folder


QUERY = "internvid_korean_political_pov_base_{}"


def multivent(folder: Path, number: int = 4, judgments: Sequence[Any] = ()) -> Path:
    """Queries with a video each, in two shards; and one about two videos, one about none."""
    ids = [f"aB3_dE-fG1{own}" for own in range(number)]
    for own, name in enumerate(ids):
        clip(folder / f"train/00000{own % 2}/{name}.mp4", has_sound=bool(own % 2))
    texts = [f'"Vote {own}, spring 2021"' for own in range(number)]
    texts += ["both of the first", "nobody knows"]
    rows = [f"{QUERY.format(own)},{text}" for own, text in enumerate(texts)]
    queries = "\r\n".join(["Query_id,query", *rows]) + "\r\n"
    (folder / "multivent_2_train_queries.csv").write_bytes(queries.encode())
    pairs = [*enumerate(ids), (number, ids[0]), (number, ids[1])]
    lines(
        folder / "multivent_2_train_judgments.jsonl",
        [
            *({"query_id": QUERY.format(q), "doc_id": own, "relevance": 1} for q, own in pairs),
            *judgments,
        ],
    )
    return folder
