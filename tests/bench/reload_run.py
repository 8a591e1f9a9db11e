"""Opens a version of an index next to the previous one and prints the memory of the vectors.

    python -m tests.bench.reload_run '{"uri": "index", "versions": [1, 2], "is_shared": true}'

The vectors are read into memory. The argument is a JSON object with the URI of the index, the
versions, and whether they share vectors. The last line of the output is a JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from pipeline.search.searcher import Searcher, open_index
from pipeline.search.storage import SharedStorages
from pipeline.tokens import normalise
from tests.bench.maxsim_index import COLUMN


def vector_bytes(*searchers: Searcher) -> int:
    """Returns the bytes of the vectors of open versions. Shared memory is counted once."""
    segments = [segment for searcher in searchers for segment in searcher.packed(COLUMN).segments]
    parts = [part for segment in segments for part in segment.parts.values()]
    return sum({part.data_ptr(): part.nbytes for part in parts}.values())


def resident_bytes() -> int:
    """Returns the resident memory of this process, without pages of files and unused memory."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) * 1024


def main(fields: dict[str, Any]) -> dict[str, Any]:
    """Measures the memory before, during and after a reload, and the time of the second opening."""
    if not fields["is_shared"]:
        setattr(SharedStorages, "get", lambda self, key, create, *_: create())  # noqa: B010
    generator = torch.Generator().manual_seed(1)

    def open_version(version: int) -> Searcher:
        searcher = open_index(fields["uri"], version, cache=False)
        searcher.load(COLUMN)
        return searcher

    def search(searcher: Searcher) -> tuple[list[str], list[float]]:
        shape = 32, searcher.packed(COLUMN).dim
        query = normalise(torch.randn(shape, generator=generator.manual_seed(1))).numpy()
        (ranking,) = searcher.rank([query], COLUMN, k=10)
        return ranking.item_ids, ranking.scores

    empty = resident_bytes()
    first = open_version(fields["versions"][0])
    search(first)
    vectors, resident = [vector_bytes(first)], [resident_bytes()]
    start = time.perf_counter()
    second = open_version(fields["versions"][1])
    seconds = time.perf_counter() - start
    ranking = search(second)
    vectors.append(vector_bytes(first, second))
    resident.append(resident_bytes())
    del first
    vectors.append(vector_bytes(second))
    resident.append(resident_bytes())
    return {
        "vector_bytes": vectors,
        "resident_bytes": [number - empty for number in resident],
        "seconds": seconds,
        "num_items": len(second.items),
        "ranking": ranking,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
