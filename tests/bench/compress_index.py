"""Runs the encoding and compression stage of the index job in this process, without Ray."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import parse
from pipeline.data.base import items_table
from pipeline.index.columns import Representation, encoder_fields, required_taps
from pipeline.index.fitting import fit, needs_fit
from pipeline.index.info import EncoderInfo
from pipeline.index.stages import Compress, Encode, Represent
from pipeline.index.token_columns import with_taps
from pipeline.registry import COMPRESSORS, ENCODERS, SOURCES
from tests.bench.reading import decoded_items, listed_items

NUM_VECTORS, RATIO, UNIT_ITEMS, NUM_FITTED = 32, 0.16, 64, 32


def encode_and_compress(
    path: Path, num_items: int, names: Sequence[str], repeats: int
) -> dict[str, Any]:
    """Encodes items with and without attention statistics and compresses them with all methods.

    Returns:
        `seconds` of "encode", "encode with attention" and "compress", each a list over repeats; the
        `methods`; and the number of `items`.
    """
    units = read(path, num_items)
    encoder = ENCODERS.resolve("minilm")
    encoder_info = EncoderInfo.from_encoder(ENCODERS.build(encoder), encoder)
    representations = [
        parse(Representation, {"compressor": fields_of(name), "id": name}) for name in names
    ]
    plain = Encode(encoder, encoder_info).load()
    encode = Encode(
        encoder, encoder_info, taps=required_taps(representations, encoder_info.num_layers)
    ).load()
    sample = [batch for _, _, batch, _ in encode.batches(units[0].slice(0, NUM_FITTED))]
    learned = {}
    for representation in representations:
        if needs_fit(representation):
            taps = COMPRESSORS.build(representation.compressor).needs_taps
            batches = [with_taps(batch, taps, encoder_info) for batch in sample]
            learned[representation.id] = fit(
                representation, encoder_info, functools.partial(iter, batches), 0
            )
    columns = [field.name for field in encoder_fields(encoder_info, keep_positions=True)]
    stage = Represent(encode, Compress(encoder_info, representations, learned, columns).load())

    def run_plain() -> dict[str, float]:
        start = time.perf_counter()
        for unit in units:
            for _ in plain.batches(unit):
                pass
        return {"encode": time.perf_counter() - start}

    def run_all() -> dict[str, float]:
        taken = {"encode with attention": 0.0, "compress": 0.0}
        for unit in units:
            _, rejects, seconds = stage.process(unit)
            assert not rejects and seconds is not None
            taken["encode with attention"] += seconds["encode"]
            taken["compress"] += seconds["compress"]
        return taken

    seconds: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        sides = (run_plain, run_all) if repeat % 2 == 0 else (run_all, run_plain)
        for side in sides:
            for name, spent in side().items():
                seconds.setdefault(name, []).append(spent)
    return {
        "seconds": {name: spent[1:] for name, spent in seconds.items()},  # the first is a warm-up
        "methods": names,
        "num_vectors": NUM_VECTORS,
        "items": sum(unit.num_rows for unit in units),
    }


def fields_of(name: str) -> dict[str, Any]:
    """Returns the spec of a method with K vectors. Methods without a fixed budget get a ratio."""
    fields = COMPRESSORS.load(name).Spec.model_fields
    if "num_vectors" in fields:
        return {"name": name, "num_vectors": NUM_VECTORS}
    return {"name": name, **({"ratio": RATIO} if "ratio" in fields else {})}


def read(path: Path, num_items: int) -> list[pa.Table]:
    """Reads the first non-empty items of a text collection in the same units as the index job."""
    source = SOURCES.build(SOURCES.resolve({"name": "text", "path": str(path)}), ("text",))
    items = itertools.chain.from_iterable(
        decoded_items(source, shard, listed_items(source, shard)) for shard in source.shards()
    )
    usable = (item for item in items if (item.text or "").strip())
    wanted = list(itertools.islice(usable, num_items))
    return [
        items_table(wanted[start : start + UNIT_ITEMS], source.payload)
        for start in range(0, len(wanted), UNIT_ITEMS)
    ]
