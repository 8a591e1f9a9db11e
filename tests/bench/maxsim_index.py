"""Index of `bench maxsim --only stored`. As a script, searches it and prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from lance import LanceDataset, LanceOperation
from lance.fragment import write_fragments

from pipeline.config import ComponentSpec, parse
from pipeline.index.columns import Representation, representation_fields
from pipeline.index.info import EncoderInfo
from pipeline.index.reader import ITEMS, part_uri
from pipeline.index.writer import STORAGE_VERSION
from pipeline.registry import ENCODERS
from pipeline.schema import ITEM, Item
from pipeline.search.searcher import open_index
from pipeline.tokens import lists_of, normalise
from tests.bench.harness import peak_bytes

FRAGMENT_ITEMS = 8192
COLUMN = "full_int8"


def write_index(
    uri: str, num_items: int, num_vectors: int, dim: int, encoder: ComponentSpec | None = None
) -> None:
    """Writes an index of random int8 vectors, in fragments as the index job does.

    Without an encoder, it is searched by vectors only.
    """
    encoder_info = EncoderInfo(
        spec={"name": "minilm"},
        fingerprint="bench",
        dim=dim,
        pooled_dim=None,
        normalised=True,
        has_spans=False,
        has_extents=False,
        prefix="minilm",
    )
    if encoder is not None:
        encoder_info = EncoderInfo.from_encoder(ENCODERS.build(encoder), encoder)
    representation = parse(Representation, {"compressor": "none", "codec": "int8", "id": COLUMN})
    fields = representation_fields(representation, encoder_info, None)
    schema = pa.schema([*ITEM, *fields])
    generator = np.random.default_rng(0)
    fragments = []
    for first in range(0, num_items, FRAGMENT_ITEMS):
        size = min(FRAGMENT_ITEMS, num_items - first)
        names = (f"{i:09}" for i in range(first, first + size))
        rows = [Item(name, name, "bench", "text", "1").row() for name in names]
        column = random_int8(generator, size, num_vectors, dim).cast(fields[0].type)
        table = pa.Table.from_pylist(rows, schema=ITEM).append_column(fields[0], column)
        fragments += write_fragments(
            table.cast(schema), part_uri(uri, ITEMS), data_storage_version=STORAGE_VERSION
        )
    LanceDataset.commit(part_uri(uri, ITEMS), LanceOperation.Overwrite(schema, fragments))
    LanceDataset(part_uri(uri, ITEMS)).create_scalar_index("item_id", "BTREE")  # as a job does


def random_int8(
    generator: np.random.Generator, num_items: int, num_vectors: int, dim: int
) -> pa.ListArray:
    """Generates random unit vectors and quantises them with the codec int8."""
    values = generator.integers(-127, 128, (num_items * num_vectors, dim), dtype=np.int8)
    scales = (1 / np.linalg.norm(values.astype(np.float32), axis=1)).astype(np.float32)
    codes = np.concatenate([values.view(np.uint8), scales[:, None].view(np.uint8)], axis=1)
    return lists_of(codes, np.full(num_items, num_vectors))


def main(fields: dict) -> dict:
    """Opens the index and measures the first search and the searches that follow it."""
    torch.set_num_threads(fields["threads"])
    os.environ["MAXRAY_CACHE"] = str(Path(fields["folder"]) / "cache")
    start = time.perf_counter()
    searcher = open_index(str(Path(fields["folder"]) / "index"))
    packed = searcher.packed(COLUMN)
    open_seconds = time.perf_counter() - start
    generator = torch.Generator().manual_seed(1)
    shape = (max(fields["queries"]), fields["query_tokens"], packed.dim)
    queries = [query.numpy() for query in normalise(torch.randn(shape, generator=generator))]

    def search(num_queries: int) -> float:
        start = time.perf_counter()
        searcher.rank(queries[:num_queries], COLUMN, k=10)
        return time.perf_counter() - start

    first_seconds = search(1)
    return {
        "open_seconds": open_seconds,
        "first_seconds": first_seconds,
        "seconds": {n: [search(n) for _ in range(fields["repeats"])] for n in fields["queries"]},
        "bytes": sum(p.nbytes for segment in packed.segments for p in segment.parts.values()),
        "peak_bytes": peak_bytes(),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
