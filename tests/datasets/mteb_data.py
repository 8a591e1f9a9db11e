"""Miniature datasets in the layouts in which the tasks of mteb are published on the hub.

A folder contains a Parquet file per configuration and split, and a README.md that lists them, like
a snapshot of the hub.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

#: Mark of tests that need mteb. The package is not imported, which takes seconds.
NEEDS_MTEB = pytest.mark.skipif(
    importlib.util.find_spec("mteb") is None, reason="needs the extra mteb"
)

Rows = Sequence[Mapping[str, Any]]

WORDS = ("harbour", "glacier", "violin", "lantern", "orchard", "compass")


def write_snapshot(
    folder: Path, configs: Mapping[str, Mapping[str, Rows]], default: str | None = None
) -> Path:
    """Writes rows by configuration and split. Columns of images, audio and videos have that type.

    Args:
        folder: Folder, which may not exist.
        configs: Rows by split, by name of the configuration.
        default: Configuration that is read without a name.
    """
    import datasets

    features = {"image": datasets.Image, "audio": datasets.Audio, "video": datasets.Video}
    listed = []
    for config, splits in configs.items():
        files = []
        for split, rows in splits.items():
            columns = {name: [row.get(name) for row in rows] for name in rows[0]}
            dataset = datasets.Dataset.from_dict(columns)
            for name in features.keys() & columns.keys():
                dataset = dataset.cast_column(name, features[name](decode=False))
                # Published files do not say that their columns are not decoded.
                dataset.info.features[name] = features[name]()
            path = folder / config / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            dataset.to_parquet(str(path))
            files.append({"split": split, "path": f"{config}/{split}-*"})
        listed.append({"config_name": config, "data_files": files})
        if config == default:
            listed[-1]["default"] = True
    header = yaml.safe_dump({"configs": listed}, sort_keys=False)
    (folder / "README.md").write_text(f"---\n{header}---\n")
    return folder


# -- values ------------------------------------------------------------------------------------


def text(number: int) -> str:
    return f"The {WORDS[number % len(WORDS)]} of document {number}."


def image(number: int, size: tuple[int, int] = (40, 56)) -> dict[str, Any]:
    pixels = np.random.default_rng(number).integers(0, 255, (*size[::-1], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": f"{number}.png"}


def audio(number: int, seconds: float = 1.0) -> dict[str, Any]:
    import soundfile

    times = np.arange(int(16_000 * seconds)) / 16_000
    file = io.BytesIO()
    soundfile.write(
        file, 0.3 * np.sin(2 * np.pi * 110 * (number + 1) * times), 16_000, "PCM_16", format="WAV"
    )
    return {"bytes": file.getvalue(), "path": f"{number}.wav"}


def video(number: int) -> dict[str, Any]:
    """Returns a video of eight frames whose brightness is that of the number."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(8):
            pixels = np.full((48, 64, 3), 20 + 30 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return {"bytes": file.getvalue(), "path": f"{number}.mp4"}


VALUES: dict[str, Callable[[int], Any]] = {
    "text": text,
    "image": image,
    "audio": audio,
    "video": video,
}

#: Numbers of documents and queries of a miniature. The last query has no judgment.
NUM_DOCUMENTS, NUM_QUERIES = 4, 3
#: (query, document, grade).
QRELS = [(0, 0, 2), (0, 1, 0), (1, 1, 1), (1, 3, 1)]


# -- layouts -----------------------------------------------------------------------------------


def standard(folder: Path, task: str, subsets: Sequence[str] | None = None, **options: Any) -> Path:
    """Writes a task in mteb's standard layout: corpus, queries, qrels and, optionally, pools.

    Args:
        folder: Folder, which may not exist.
        task: Name of the task, whose modalities and split are used.
        subsets: Names of the subsets, which prefix configurations. None: those of the task.
        options: `pools` writes `top_ranked`, and `instructions` the instructions of queries.
    """
    import mteb
    from mteb.types import PromptType

    metadata = mteb.get_task(task).metadata
    names = subsets or (metadata.hf_subsets if metadata.is_multilingual else [""])
    queries, documents = (
        metadata.get_modalities(part) for part in (PromptType.query, PromptType.document)
    )
    configs: dict[str, dict[str, Rows]] = {}
    for subset in names:
        prefix = f"{subset}-" if subset else ""
        for split in metadata.eval_splits:
            parts = standard_parts(queries, documents, **options)
            for part, rows in parts.items():
                configs.setdefault(f"{prefix}{part}", {})[split] = rows
    return write_snapshot(folder, configs)


def standard_parts(
    queries: Sequence[str],
    documents: Sequence[str],
    pools: bool = False,
    instructions: bool = False,
) -> dict[str, Rows]:
    """Returns the rows of the configurations of a task in mteb's standard layout."""
    corpus = [
        {"id": f"d{i}", **({"title": f"Title {i}"} if "text" in documents else {})}
        | {name: VALUES[name](i) for name in documents}
        for i in range(NUM_DOCUMENTS)
    ]
    parts: dict[str, Rows] = {
        "corpus": corpus,
        "queries": [
            {"id": f"q{i}", **{name: VALUES[name](i) for name in queries}}
            for i in range(NUM_QUERIES)
        ],
        "qrels": [
            {"query-id": f"q{q}", "corpus-id": f"d{d}", "score": score} for q, d, score in QRELS
        ],
    }
    if pools:
        parts["top_ranked"] = [
            {"query-id": f"q{q}", "corpus-ids": [f"d{(q + i) % NUM_DOCUMENTS}" for i in range(3)]}
            for q in range(NUM_QUERIES)
        ]
    if instructions:
        parts["instruction"] = [
            {"query-id": f"q{q}", "instruction": f"Ignore document {q}."}
            for q in range(NUM_QUERIES)
        ]
    return parts


def _vidore_parts(**columns: Callable[[int], Any]) -> dict[str, Rows]:
    return {
        "corpus": [{"corpus-id": i, "image": image(i)} for i in range(NUM_DOCUMENTS)],
        "queries": [
            {"query-id": i, "query": text(i), **{n: value(i) for n, value in columns.items()}}
            for i in range(NUM_QUERIES)
        ],
        "qrels": [{"query-id": q, "corpus-id": d, "score": score} for q, d, score in QRELS],
    }


def vidore_v1(folder: Path, task: str) -> Path:
    """Writes a task of ViDoRe v1: numeric ids and the column `query`."""
    return write_snapshot(folder, {name: {"test": rows} for name, rows in _vidore_parts().items()})


def vidore_v2(folder: Path, task: str) -> Path:
    """Writes a task of ViDoRe v2: the queries have a language."""
    languages = ("english", "french", "english")
    parts = _vidore_parts(language=lambda i: languages[i])
    return write_snapshot(folder, {name: {"test": rows} for name, rows in parts.items()})


def jina_vdr(folder: Path, task: str) -> Path:
    """Writes a task of JinaVDR: a folder per part, below that of the language if several."""
    import mteb

    languages = mteb.get_task(task).metadata.hf_subsets
    prefixes = [f"{language}/" for language in languages]
    configs = {
        f"{p}{name}": {"test": rows} for p in prefixes for name, rows in _vidore_parts().items()
    }
    write_snapshot(folder, configs)
    (folder / "README.md").unlink()  # folders are read without configurations
    return folder


#: Domains of BRIGHT, which are splits of its configurations.
BRIGHT_DOMAINS = (
    "aops biology earth_science economics leetcode pony psychology robotics stackoverflow "
    "sustainable_living theoremqa_questions theoremqa_theorems"
)


def bright(folder: Path, task: str) -> Path:
    """Writes a domain of BRIGHT: documents, and examples with gold and excluded ids."""
    import mteb

    long = mteb.get_task(task).metadata.eval_splits[0] != "standard"
    rows = [{"id": f"d{i}", "content": text(i)} for i in range(NUM_DOCUMENTS)]
    examples = [
        {
            "id": f"q{q}",
            "query": text(q),
            "gold_ids": [f"d{q}"],
            "gold_ids_long": [f"d{q}"],
            "excluded_ids": ["d3"] if q == 1 else ["N/A"],
        }
        for q in range(NUM_QUERIES)
    ]
    name = "long_documents" if long else "documents"
    domains = BRIGHT_DOMAINS.split()
    return write_snapshot(
        folder,
        {name: dict.fromkeys(domains, rows), "examples": dict.fromkeys(domains, examples)},
    )


def long_embed(folder: Path, task: str) -> Path:
    """Writes a configuration of LongEmbed: one split per part, with the columns of all parts."""
    import mteb

    config = mteb.get_task(task).metadata.dataset["name"]
    length = {"context_length": 256}
    splits = {
        "corpus": [{"doc_id": f"d{i}", "text": text(i)} for i in range(NUM_DOCUMENTS)],
        "queries": [{"qid": f"q{i}", "text": text(i)} for i in range(NUM_QUERIES)],
        "qrels": [{"qid": f"q{i}", "doc_id": f"d{i}"} for i in range(NUM_QUERIES)],
    }
    columns = dict.fromkeys(["qid", "doc_id", "text"], "")
    filled = {name: [{**columns, **row, **length} for row in rows] for name, rows in splits.items()}
    return write_snapshot(folder, {config: filled})


def captions(folder: Path, task: str) -> Path:
    """Writes a table of audio files with captions, as of Clotho."""
    rows = [{"index": f"a{i}", "audio": audio(i), "text": text(i)} for i in range(NUM_DOCUMENTS)]
    return write_snapshot(folder, {"default": {"test": rows}})


def pairs(folder: Path, task: str, caption: str = "caption") -> Path:
    """Writes a table of videos, their audio and their captions, as of MVEB."""
    rows = [{"video": video(i), "audio": audio(i), caption: text(i)} for i in range(NUM_DOCUMENTS)]
    return write_snapshot(folder, {"default": {"test": rows}})
