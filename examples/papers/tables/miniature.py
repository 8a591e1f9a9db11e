"""Generated data and untrained models of the miniatures of tables."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from examples.papers.synthetic import shapes_files
from examples.papers.tables.plan import MINIATURE
from pipeline.config import SpecError
from pipeline.runtime.atomic import write_atomic
from pipeline.runtime.text import Table
from tests.tiny import checkpoints
from tests.tiny import untrained as tiny
from tests.tiny.checkpoints import CRANFIELD

#: Subfolder of the models, by family.
MODELS = "models"
NUM_SCENES = 16
NUM_QUERIES = 8
CLIPS = ("talk", "tables")


def generate(specs: Any, folder: Path) -> None:
    """Generates the data and models that the paths of specs below `folder` name, if missing."""
    for name in sorted(set(_names(specs, f"{folder}/"))):
        target = folder / name
        if target.exists():
            continue
        part = folder / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        _generator(name)(part)
        part.rename(target)


def _names(value: Any, prefix: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _names(inner, prefix)
    elif isinstance(value, str) and value.startswith(prefix):
        parts = value.removeprefix(prefix).split("/")
        yield "/".join(parts[: 2 if parts[0] == MODELS else 1])


def _generator(name: str) -> Callable[[Path], Any]:
    models = {
        "bert": tiny.bert,
        **{family: _seeded(write) for family, write in checkpoints.FAMILIES.items()},
    }
    generators: dict[str, Callable[[Path], Any]] = {
        "shapes": lambda folder: shapes_files.write_collection(folder, NUM_SCENES),
        "texts": write_texts,
        "msrvtt": write_msrvtt,
        "multivent": write_multivent,
        "karpathy": write_karpathy,
        **{f"{MODELS}/{family}": write for family, write in models.items()},
    }
    if name not in generators:
        raise SpecError.unknown_name(f"path below {MINIATURE}", name, generators)
    return generators[name]


def _seeded(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Returns a function that writes a checkpoint whose weights do not depend on earlier calls."""

    def write_seeded(folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            write(folder)

    return write_seeded


def write_texts(folder: Path) -> None:
    """Writes a part of Cranfield in BEIR format, and its judged pairs as training data."""
    texts = {row["_id"]: row for row in _read_lines(CRANFIELD / "corpus.jsonl")}
    queries = {row["_id"]: row for row in _read_lines(CRANFIELD / "queries.jsonl")}
    judged = list(
        csv.DictReader(
            (CRANFIELD / "qrels/test.tsv").read_text("utf-8").splitlines(), delimiter="\t"
        )
    )
    chosen = list(dict.fromkeys(row["query-id"] for row in judged if row["corpus-id"] in texts))
    chosen = chosen[:NUM_QUERIES]
    best: dict[str, str] = {}  # one document per query
    for row in judged:
        if row["query-id"] in chosen and row["corpus-id"] in texts:
            best.setdefault(row["query-id"], row["corpus-id"])
    documents = list(dict.fromkeys([*best.values(), *list(texts)[:NUM_SCENES]]))
    qrels = "".join(f"{query}\t{document}\t1\n" for query, document in best.items())
    pairs = [
        {
            "query": queries[query]["text"],
            "document_id": document,
            "negatives": [name for name in documents if name != document][:3],
            "scores": [4.0, 1.0, 0.5, 0.0],
        }
        for query, document in best.items()
    ]
    documents_rows = [{"document_id": name, "text": texts[name]["text"]} for name in documents]
    files = {
        "corpus.jsonl": _lines(texts[name] for name in documents),
        "queries.jsonl": _lines(queries[name] for name in best),
        "qrels/test.tsv": f"query-id\tcorpus-id\tscore\n{qrels}",
        "pairs/train.jsonl": _lines(pairs),
        "documents/documents.jsonl": _lines(documents_rows),
    }
    for name, text in files.items():
        write_atomic(str(folder / name), text)


def write_msrvtt(folder: Path) -> None:
    """Writes the shipped clips as a training and test split of MSR-VTT."""
    captions = _clips(folder / "videos", "video")
    header = ["key", "vid_key", "video_id", "sentence"]
    rows = [
        [f"ret{number}", f"msr{number}", video, caption]
        for number, (video, caption) in enumerate(captions.items())
    ]
    data = {
        "videos": [{"video_id": video, "split": "train"} for video in captions],
        "sentences": [
            {"sen_id": number, "video_id": video, "caption": caption}
            for number, (video, caption) in enumerate(captions.items())
        ],
    }
    write_atomic(str(folder / "MSRVTT_JSFUSION_test.csv"), Table([header, *rows]).csv())
    train = Table([["video_id"], *([video] for video in captions)])
    write_atomic(str(folder / "MSRVTT_train.9k.csv"), train.csv())
    write_atomic(str(folder / "MSRVTT_data.json"), json.dumps(data))


def write_multivent(folder: Path) -> None:
    """Writes the shipped clips as videos, queries and judgments of MultiVENT 2.0."""
    captions = _clips(folder / "videos", "")
    rows = ([f"q{video}", caption] for video, caption in captions.items())
    judgments = ({"query_id": f"q{v}", "doc_id": v, "relevance": 1} for v in captions)
    write_atomic(str(folder / "queries.csv"), Table([["Query_id", "query"], *rows]).csv())
    write_atomic(str(folder / "judgments.jsonl"), _lines(judgments))


def write_karpathy(folder: Path) -> None:
    """Writes shipped photos with a Karpathy file, and as a WebDataset archive."""
    photos = CRANFIELD.parent / "photos"
    data = json.loads((photos / "captions.json").read_text("utf-8"))
    captions: dict[int, list[str]] = {}
    for row in data["annotations"]:
        captions.setdefault(row["image_id"], []).append(row["caption"].strip())
    (folder / "images").mkdir(parents=True)
    (folder / "archives").mkdir()
    rows = []
    with tarfile.open(folder / "archives/000.tar", "w") as archive:
        for number, image in enumerate(data["images"][:NUM_QUERIES]):
            # The untrained text towers read 16 tokens.
            texts = [" ".join(text.split()[:3]) for text in captions[image["id"]][:2]]
            file = photos / "images" / image["file_name"]
            shutil.copy(file, folder / "images")
            archive.add(file, f"{number:05}.jpg")
            member = tarfile.TarInfo(f"{number:05}.txt")
            member.size = len(texts[0].encode())
            archive.addfile(member, io.BytesIO(texts[0].encode()))
            sentences = [{"raw": text, "tokens": []} for text in texts]
            rows.append(
                {"filename": file.name, "imgid": number, "split": "test", "sentences": sentences}
            )
    write_atomic(str(folder / "dataset.json"), json.dumps({"images": rows, "dataset": "flickr30k"}))


def _clips(folder: Path, prefix: str) -> dict[str, str]:
    clips = CRANFIELD.parent / "clips"
    folder.mkdir(parents=True)
    contents = json.loads((clips / "clips.json").read_text("utf-8"))["clips"]
    captions = {}
    for number, clip in enumerate(contents):
        shutil.copy(clips / clip["file"], folder / f"{prefix}{number}.mp4")
        captions[f"{prefix}{number}"] = " ".join(clip["slides"][0]["text"].split()[:8])
    return captions


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text("utf-8").splitlines())


def _lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
