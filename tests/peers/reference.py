"""Reference vectors of published models, made with the library that a checkpoint comes from.

    python -m tests.peers.reference                          # list the models
    python -m tests.peers.reference vidore/colqwen2-v1.0     # write one file
    python -m tests.peers.reference all

Run it once where the hub can be reached, in an environment that has the library, and commit the
files in `tests/peers/references`. `pytest -m hub tests/peers/test_reference.py` then compares our
vectors with them. A file has, for a query and a page of `jobs/data`, the number of tokens and the
projections of evenly spaced vectors on fixed directions, with the revision and all versions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.conftest import ROOT

FOLDER = Path(__file__).parent / "references"
PHOTO = ROOT / "jobs/data/photos/images/000000062554.jpg"
#: A photo between margins, in the aspect ratio of a page.
PAGE_SIZE = (1190, 1684)
QUERY = "What is the total revenue of the third quarter?"
NUM_VECTORS = NUM_DIRECTIONS = 16
VERSIONS = (
    "colpali-engine",
    "peft",
    "sentence-transformers",
    "tokenizers",
    "torch",
    "transformers",
)


@dataclass(frozen=True)
class Peer:
    """The classes of a library that read a model.

    Attributes:
        package: Distribution of the library.
        model, processor: Classes of `module`.
        settings: Attributes of the processor, such as the prefix of queries.
    """

    package: str
    module: str
    model: str
    processor: str = ""
    settings: tuple[tuple[str, Any], ...] = ()


def engine(model: str, processor: str = "", prefix: str = "") -> Peer:
    """Returns the classes of colpali-engine."""
    settings = (("query_prefix", prefix),) if prefix else ()
    module = "colpali_engine.models"
    return Peer("colpali-engine", module, model, processor or f"{model}Processor", settings)


def native(name: str) -> Peer:
    """Returns the classes of transformers."""
    return Peer("transformers", "transformers", f"{name}ForRetrieval", f"{name}Processor")


LATE = Peer("sentence-transformers", "sentence_transformers", "MultiVectorEncoder")
#: Classes by hub name.
PEERS = {
    "vidore/colpali-v1.2": engine("ColPali", prefix="Query: "),
    "vidore/colpali-v1.3": engine("ColPali", prefix="Query: "),
    "vidore/colpali-v1.3-hf": native("ColPali"),
    "vidore/colqwen2-v1.0": engine("ColQwen2", prefix="Query: "),
    "vidore/colqwen2-v1.0-hf": native("ColQwen2"),
    "vidore/colqwen2.5-v0.2": engine("ColQwen2_5", "ColQwen2_5_Processor", "Query: "),
    "nomic-ai/colnomic-embed-multimodal-3b": engine(
        "ColQwen2_5", "ColQwen2_5_Processor", "Query: "
    ),
    "ApsaraStackMaaS/EvoQwen2.5-VL-Retriever-3B-v1": engine(
        "ColQwen2_5", "ColQwen2_5_Processor", "Query: "
    ),
    "athrael-soju/colqwen3.5-4.5B-v3": engine("ColQwen3_5"),
    "vultr/VultronRetrieverFlash-Qwen3.5-0.8B": engine("ColQwen3_5"),
    "vultr/VultronRetrieverCore-Qwen3.5-4.5B": engine("ColQwen3_5"),
    "vidore/colSmol-256M": engine("ColIdefics3", prefix="Query: "),
    "vidore/colSmol-500M": engine("ColIdefics3", prefix="Query: "),
    "ModernVBERT/colmodernvbert": engine("ColModernVBert"),
    "vidore/colqwen-omni-v0.1": engine("ColQwen2_5Omni"),
    "colbert-ir/colbertv2.0": LATE,
    "lightonai/GTE-ModernColBERT-v1": LATE,
}


def page() -> Image.Image:
    """Returns the page, whose pixels do not depend on a PDF renderer."""
    image = Image.new("RGB", PAGE_SIZE, "white")
    with Image.open(PHOTO) as photo:
        image.paste(photo.convert("RGB"), (100, 150))
    return image


def directions(width: int) -> np.ndarray:
    """Returns fixed unit vectors, (NUM_DIRECTIONS, width)."""
    grid = np.arange(1, NUM_DIRECTIONS + 1)[:, None] * np.arange(1, width + 1)
    values = np.sin(grid * 1.7) + np.cos(grid * 0.31)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def summary(vectors_TD: np.ndarray) -> dict[str, Any]:
    """Returns the shape and the projections of evenly spaced unit vectors."""
    vectors = vectors_TD.astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = np.linspace(0, len(vectors) - 1, min(NUM_VECTORS, len(vectors))).round().astype(int)
    projections = (vectors[rows] @ directions(vectors.shape[1]).T).round(6)
    return {"shape": list(vectors.shape), "projections": projections.tolist()}


def file_name(model: str) -> Path:
    """Returns the path of the reference of a model."""
    return FOLDER / f"{model.replace('/', '--')}.json"


@torch.no_grad()
def encode(peer: Peer, model: str, revision: str) -> dict[str, np.ndarray]:
    """Encodes the query and, with models of images, the page with the library."""
    module = importlib.import_module(peer.module)
    load: Callable[..., Any] = getattr(module, peer.model)
    if not peer.processor:
        encoder = load(model, revision=revision, device="cpu", model_kwargs={"dtype": "float32"})
        return {"query": encoder.encode_query([QUERY], convert_to_numpy=True)[0]}
    model_class, processor_class = load, getattr(module, peer.processor)
    network = model_class.from_pretrained(model, revision=revision, dtype=torch.float32).eval()
    processor = processor_class.from_pretrained(model, revision=revision)
    for name, value in peer.settings:
        setattr(processor, name, value)
    vectors = {}
    for name, inputs in {
        "query": processor.process_queries([QUERY]),
        "page": processor.process_images([page()]),
    }.items():
        output = network(**inputs)
        vectors[name] = getattr(output, "embeddings", output)[0].float().numpy()
    return vectors


def make(model: str, peer: Peer, revision: str | None = None) -> Path:
    """Writes the reference of a model at a commit and returns the path."""
    from huggingface_hub import HfApi

    commit = HfApi().model_info(model, revision=revision).sha
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    reference = {
        "model": model,
        "revision": commit,
        "library": peer.package,
        "settings": dict(peer.settings),
        "versions": versions,
        "vectors": {name: summary(values) for name, values in encode(peer, model, commit).items()},
    }
    FOLDER.mkdir(exist_ok=True)
    path = file_name(model)
    path.write_text(json.dumps(reference, indent=1) + "\n", "utf-8")
    return path


def main(names: list[str]) -> None:
    """Writes the references of the named models."""
    from pipeline.eval.planning.models import published_models

    known = published_models()
    for name in PEERS if names == ["all"] else names:
        print(make(name, PEERS[name], known[name].revision))
    if not names:
        print(*PEERS, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
