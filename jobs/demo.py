"""Runs the demo: indexes, searches and evaluates the shipped collections.

    maxray demo

The first index holds abstracts, PDF pages, photos, video clips and a speech, and is searched for
answers on a page, in speech and in a photo. The second part indexes scenes of coloured shapes with
a small ColPali, with and without a projection trained with SaMer, searches them by text and by
image, and reranks the results with a small EDJE. The demo needs neither a GPU nor a model hub. A
second run reuses what is indexed and evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jobs
from jobs import draw, evaluate, index, search

RESOURCES = "cluster/profiles/laptop.yaml"
OUT = "out/demo"
INDEX = f"{OUT}/index"
SHAPES = f"{OUT}/shapes"
#: Scenes with captions, judgments and boxes.
SCENES = "jobs/data/shapes"
#: Query for the scenes.
SCENE = "a large red circle above a small blue star"
#: Query whose results are reranked: the caption of the first scene.
FIRST = "a small green circle below a small red cross"
#: Representations of the scenes that are evaluated.
SHOWN = "full, kcenter_16, hpool_16, samer_16, kcenter_8, samer_8"
#: Folder of the reranker.
EDJE = "jobs/data/models/shapes_edje"
COLLECTIONS = ["cranfield", "us_government", "photos"]
#: Queries and the representation that each searches.
QUESTIONS = [
    ("how does a slipstream change the lift of a wing", "kcenter_32"),
    ("how many people have a severe disability", "full"),
    ("ask what you can do for your country", "full"),
    ("two people on horseback at the sea", "caption_full"),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs and times the phases in order."""
    jobs.parser(__doc__).parse(arguments)
    spent: list[tuple[str, float]] = []

    def phase(name: str, run: Callable[[Sequence[str]], None], *arguments: str) -> None:
        print(f"\n== {name}: python -m {run.__module__} {' '.join(arguments)}", flush=True)
        start = time.perf_counter()
        run(arguments)
        spent.append((name, time.perf_counter() - start))

    phase("index", index.main, "jobs/specs/demo.yaml", "--resources", RESOURCES)
    for number, (question, representation) in enumerate(QUESTIONS, start=1):
        options = ["--representation", representation, "--k", "2", "--group-by", "parent"]
        options += ["--save-maps", f"{OUT}/maps/{number}"] if number > 1 else []
        phase("search", search.main, INDEX, question, *options)
    for name in COLLECTIONS:
        phase(f"evaluate {name}", evaluate.main, f"jobs/specs/{name}_evaluate.yaml")
    scenes(phase, SCENES, SHAPES)
    print("\ntimes: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent))
    for name in COLLECTIONS:
        print(f"report: {OUT}/{name.replace('_', '-')}/report.html")
    print(f"report: {SHAPES}/index_evaluation/report.html, {SHAPES}/trained_evaluation/report.html")
    print(f"maps:   {OUT}/maps, {SHAPES}/maps; before and after reranking: {SHAPES}/edje.png")


def scenes(phase: Callable[..., None], data: str, folder: str) -> None:
    """Indexes and evaluates scenes, and searches them by text and by image."""
    last = max(map(str, Path(data, "images").iterdir()))
    with jobs.cluster():  # one cluster for both jobs
        for spec, name in (("shapes", "index"), ("shapes_trained", "trained")):
            at = [f"index={folder}/{name}", f"source.path={data}/images"]
            options = ["--resources", RESOURCES]
            phase(f"index {spec}", index.main, f"jobs/specs/{spec}.yaml", *at, *options)
    for name, query in (("words", [SCENE]), ("image", ["--image", last])):
        options = ["--representation", "samer_16", "--k", "3"]
        options += ["--save-maps", f"{folder}/maps/{name}"]
        phase(f"search by {name}", search.main, f"{folder}/trained", *query, *options)
    phrases = f"{data}/phrases.jsonl"
    names = ["--index", f"{folder}/index", "full", "samer_16"]
    names += ["--index", f"{folder}/trained", "samer_16"]
    phase("map phrases", draw.main, "maps", phrases, f"{folder}/maps/phrases.png", *names)
    found = []
    for name, shown in (("index", SHOWN), ("trained", "")):
        found.append(f"{folder}/{name}_evaluation")
        at = [f"index={folder}/{name}", f"benchmark.path={data}", f"grounding={phrases}"]
        at += [f"representations=[{shown}]", f"output={found[-1]}"]
        at += [] if name == "index" else ["rerank=[]"]  # no rerank tokens stored
        phase(f"evaluate {name}", evaluate.main, "jobs/specs/shapes_evaluate.yaml", *at)
    phase("compare", evaluate.main, "compare", *found)
    options = ["--representation", "samer_8", "--k", "5", "--rerank", "edje", f"model={EDJE}"]
    options += ["--save-sheet", f"{folder}/edje.png"]
    phase("search and rerank", search.main, f"{folder}/index", FIRST, *options)


if __name__ == "__main__":
    jobs.run(main)
