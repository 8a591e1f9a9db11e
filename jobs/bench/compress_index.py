"""The index job's own stage on shipped abstracts, in this process and without Ray."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.compression import Compressor
from pipeline.config import SpecError, parse
from pipeline.index.columns import EncoderFacts, Representation, encoder_fields
from pipeline.index.stages import Compress, Encode, Represent
from pipeline.registry import COMPRESSORS, ENCODERS, SOURCES
from pipeline.schema import Item
from pipeline.sources import items_table

NUM_VECTORS, UNIT_ITEMS, NUM_FITTED = 32, 64, 32


def encode_and_compress(
    path: Path, num_items: int, names: Sequence[str], repeats: int
) -> dict[str, Any]:
    """Encodes once a repeat and runs all methods on it.

    Methods that need what this encoder does not give are left out.

    Returns:
        `seconds` of "encode" and "compress", a list over repeats; the `methods` and `items` it did.
    """
    units = read(path, num_items)
    encoder = ENCODERS.resolve("minilm")
    facts = EncoderFacts.of(ENCODERS.build(encoder), encoder)
    encode = Encode(encoder, facts)
    encode.setup()  # also warms up: the sample is encoded before the time begins
    sample = [batch for *_, batch, _ in encode.batches(units[0].slice(0, NUM_FITTED))]
    representations, artefacts = [], {}
    for name in names:
        cls: type[Compressor] = COMPRESSORS.load(name)
        fields = {"name": name}
        if "num_vectors" in cls.Spec.model_fields:
            fields["num_vectors"] = NUM_VECTORS
        try:
            compressor = cls(parse(cls.Spec, fields))
        except SpecError:  # it needs more than a name and K
            continue
        if not {tap.name for tap in compressor.needs_taps} <= set(sample[0].taps):
            continue
        representation = parse(Representation, {"compressor": fields, "id": name})
        representations.append(representation)
        if cls.needs_fit:
            artefacts[representation.id] = cls.fit(compressor.spec, sample)
    own = [field.name for field in encoder_fields(facts, keep_positions=True)]
    stage = Represent(Encode(encoder, facts), Compress(facts, representations, artefacts, own))
    stage.setup()
    stage.process(units[0])
    seconds: dict[str, list[float]] = {"encode": [], "compress": []}
    for _ in range(repeats):
        taken = dict.fromkeys(seconds, 0.0)
        for unit in units:
            _, rejects = stage.process(unit)
            assert not rejects
            for name in taken:
                taken[name] += stage.seconds(0)[name]
        for name, spent in taken.items():
            seconds[name].append(spent)
    return {
        "seconds": seconds,
        "methods": [representation.id for representation in representations],
        "num_vectors": NUM_VECTORS,
        "items": sum(unit.num_rows for unit in units),
    }


def read(path: Path, num_items: int) -> list[pa.Table]:
    """The first items of a text collection that have a text, in units of the index job's size."""
    source = SOURCES.build(SOURCES.resolve({"name": "text", "path": str(path)}), ("text",))
    items = itertools.chain.from_iterable(
        source.decode(shard, list(enumerate(source.scan(shard)))) for shard in source.shards()
    )
    usable = (item for item in items if isinstance(item, Item) and (item.text or "").strip())
    wanted = list(itertools.islice(usable, num_items))
    return [
        items_table(wanted[start : start + UNIT_ITEMS], source.payload)
        for start in range(0, len(wanted), UNIT_ITEMS)
    ]
