"""Downloads the packages of the recipe, extracts their passages and writes a slice of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import bm25s
import numpy as np
import yaml

from examples.collection.extract import EXTRACTORS, Passage
from examples.papers.downloads.fetch import fetch_url
from pipeline.config import SpecError

RECIPE = Path(__file__).with_name("recipe.yaml")
#: Numbers of passages of the slices. Each contains the smaller ones.
SLICES = {"1k": 1_000, "10k": 10_000, "100k": 100_000, "all": None}


def build(data: Path, name: str, recipe: Path = RECIPE) -> list[str]:
    """Writes `corpus.jsonl`, `queries.jsonl` and `qrels/{choose,prove}.tsv` to `DATA/NAME`.

    Returns:
        The packages that could not be read. They are printed, and the rest is written.
    """
    spec = yaml.safe_load(recipe.read_text())
    passages: list[Passage] = []
    missing = []
    for file in spec["files"]:
        path = data / "downloads" / Path(file["path"]).name
        url = f"{spec['mirror']}/{file['path']}"
        try:
            fetch_url(url, path, f"sha256:{file['sha256']}", print)
        except SpecError as error:
            print(f"{file['package']} is missing: {error}")
            missing.append(file["package"])
            continue
        found = list(EXTRACTORS[file["kind"]](path, file["package"], file["language"]))
        print(f"{file['package']}: {len(found):,} passages")
        passages += found
    passages.sort(key=lambda passage: (_hash(passage.group), passage.id))
    _write(data / name, passages, SLICES[name])
    return missing


def _write(folder: Path, passages: list[Passage], limit: int | None) -> None:
    """Writes the first `limit` items; equal texts are one item, which answers their queries."""
    unique: dict[str, Passage] = {}
    answers: dict[str, dict[str, Passage]] = {}
    for passage in passages:
        text = " ".join(passage.text.casefold().split())
        if text not in unique and limit is not None and len(unique) == limit:
            continue
        item = unique.setdefault(text, passage)
        if passage.query:
            answers.setdefault(passage.query, {})[item.id] = item
    items = unique.values()
    ids = np.array([item.id for item in items])
    ranked = _bm25([item.text for item in items], list(answers))
    counts: Counter[tuple[str, str, str]] = Counter()
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with (folder / "corpus.jsonl").open("w") as file:
        for item in items:
            row = {"_id": item.id, "title": "", **item._asdict()}
            del row["id"], row["query"], row["group"]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    qrels = {half: ["query-id\tcorpus-id\tscore\n"] for half in ("choose", "prove")}
    with (folder / "queries.jsonl").open("w") as file:
        for number, (query, found) in enumerate(answers.items()):
            key = _hash(query)
            first = next(iter(found.values()))
            # Translations are in the same half.
            half = "choose" if int(_hash(f"half {first.group}")[:2], 16) < 128 else "prove"
            bm25 = "found" if found.keys() & set(ids[ranked[number]]) else "not found"
            row = {
                "_id": key[:16],
                "text": query,
                "kind": first.kind,
                "language": first.language,
                "bm25": bm25,
            }
            counts[half, first.kind, bm25] += 1
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            qrels[half] += [f"{key[:16]}\t{identity}\t1\n" for identity in found]
    for half, lines in qrels.items():
        (folder / "qrels" / f"{half}.tsv").write_text("".join(lines))
    for (half, kind, bm25), count in sorted(counts.items()):
        print(f"{half}, {kind}: BM25 has {bm25} {count:,} in its first ten")


def _bm25(texts: list[str], queries: list[str]) -> list[np.ndarray]:
    """Returns the positions of the first ten of each query; none if it shares no word."""
    ranker = bm25s.BM25()
    ranker.index(bm25s.tokenize(texts, stopwords=[], show_progress=False), show_progress=False)
    words = bm25s.tokenize(queries, stopwords=[], return_ids=False, show_progress=False)
    known = [[word for word in query if word and word in ranker.vocab_dict] for query in words]
    ranked = [np.empty(0, np.int64)] * len(queries)
    numbers = [number for number, query in enumerate(known) if query]
    if numbers:
        some = [known[number] for number in numbers]
        k = min(10, len(texts))
        found, scores = ranker.retrieve(some, k=k, show_progress=False)
        for number, row, score in zip(numbers, found, scores, strict=True):
            ranked[number] = row[score > 0]
    return ranked


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
