"""An index of given vectors, whose text queries are numbers of items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import Index


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Index of `item-0` to `item-11`; the query `text 4` has the vectors of `item-4`."""
    vectors = np.random.default_rng(0).standard_normal((12, 4, 16))
    index = Index(
        str(tmp_path / "library"),
        encode_queries=lambda texts: [vectors[int(text.split()[1])] for text in texts],
    )
    index.add(
        [f"item-{number}" for number in range(12)],
        vectors,
        texts=[None if number == 9 else f"text {number}" for number in range(12)],
        titles=[f"title {number}" for number in range(12)],
        metadata=[
            {"year": 2000 + number, "source": f"{number}.pdf"} if number != 9 else None
            for number in range(12)
        ],
    )
    return index
