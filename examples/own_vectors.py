"""Indexes token vectors of another model, compresses them, and searches with query vectors.

The vectors in this example are random; replace `make_vectors` with your model. Items may have any
number of vectors of dimension `DIM`.

    python examples/own_vectors.py OUTPUT_FOLDER
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

from pipeline import open_index

DIM = 32
NUM_ITEMS = 50


def make_vectors(seed: int) -> list[np.ndarray]:
    """Returns one array (number of tokens, DIM) of float32 per item."""
    random = np.random.default_rng(seed)
    return [
        random.standard_normal((random.integers(10, 40), DIM)).astype(np.float32)
        for _ in range(NUM_ITEMS)
    ]


def main(output: Path) -> None:
    """Writes the vectors and a spec, runs the index job and searches both representations."""
    items = make_vectors(seed=0)
    data = output / "vectors"
    data.mkdir(parents=True, exist_ok=True)
    np.save(data / "vectors.npy", np.concatenate(items))
    np.save(data / "lengths.npy", np.array([len(item) for item in items]))
    (data / "ids.txt").write_text("".join(f"item-{i:03}\n" for i in range(len(items))))

    spec = {
        "index": str(output / "index"),
        "source": {"name": "vectors", "path": str(data), "dim": DIM},
        "encoder": {"name": "precomputed", "dim": DIM, "label": "random-vectors"},
        "representations": [
            {"compressor": "none"},
            {"compressor": {"name": "hpool", "num_vectors": 8}},
        ],
    }
    (output / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    command = [sys.executable, "-m", "jobs.index", str(output / "spec.yaml")]
    subprocess.run(command, check=True)

    searcher = open_index(spec["index"])
    query = items[7][:5]  # five tokens of item-007, which must be the first hit
    for representation in ("full", "hpool_8"):
        hits = searcher.search(query, representation, k=3)
        print(representation, [(hit.item_id, round(hit.score, 3)) for hit in hits])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
