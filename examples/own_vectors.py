"""Indexes token vectors of another model, compresses them, and searches with query vectors.

The vectors in this example are random; replace `make_vectors` with your model. Items may have any
number of vectors of dimension `DIM`.

    python examples/own_vectors.py OUTPUT_FOLDER
"""

import sys

import numpy as np

from pipeline import Index

DIM = 32
NUM_ITEMS = 50


def make_vectors(seed: int) -> list[np.ndarray]:
    """Returns one array (number of tokens, DIM) of float32 per item."""
    random = np.random.default_rng(seed)
    return [
        random.standard_normal((random.integers(10, 40), DIM)).astype(np.float32)
        for _ in range(NUM_ITEMS)
    ]


def main(folder: str) -> None:
    """Adds the items to an index, compresses them and searches both representations."""
    items = make_vectors(seed=0)
    index = Index(folder)
    index.add([f"item-{number:03}" for number in range(NUM_ITEMS)], items)
    query = items[7][:5]  # five tokens of item-007, which must be the first hit
    for representation in ("full", index.compress("hpool", 8)):
        hits = index.search(query, representation, k=3)
        print(representation, [(hit.item_id, round(hit.score, 3)) for hit in hits])


if __name__ == "__main__":
    main(sys.argv[1])
