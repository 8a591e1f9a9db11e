"""Ray tasks of the index job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from pipeline.config import ComponentSpec, SpecError, dump, within
from pipeline.decoding import Unreadable
from pipeline.index import listing, unit_reader
from pipeline.index.artefacts import Sample
from pipeline.index.columns import Representation, compressor_remarks, every_representation
from pipeline.index.fitting import Learned, fit
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import Index, quote
from pipeline.index.spec import FitSample, IndexSpec
from pipeline.index.stages import Encode, TokenEncoder
from pipeline.index.token_columns import with_taps
from pipeline.registry import COMPRESSORS, ENCODERS, SOURCES
from pipeline.tokens import TokenBatch

plan = ray.remote(listing.plan)
list_shard = ray.remote(listing.list_shard)
mark_duplicates = ray.remote(listing.mark_duplicates)
unlisted_rejects = ray.remote(listing.unlisted_rejects)
gone_rows = ray.remote(listing.gone_rows)


def map_shards(
    task: Any,
    job: ListingJob,
    shards: Iterable[int],
    max_running: int,
    check: Callable[[], None],
) -> Iterator[Any]:
    """Yields the results of a task for each shard, as they come.

    Args:
        task: Ray task that is called with the listing job and a shard.
        job: Settings of the listing.
        shards: Shards.
        max_running: Maximum number of tasks at a time. Beyond what the profile lets read, each
            would start a process, which takes longer than the listing on a small machine.
        check: Raises whatever ends the job.
    """
    running: list[ray.ObjectRef] = []
    shards = iter(shards)
    while True:
        while len(running) < max_running and (shard := next(shards, None)) is not None:
            running.append(task.remote(job, shard))
        if not running:
            return
        ready, running = ray.wait(running, timeout=1.0)
        check()
        yield from ray.get(ready)


@ray.remote
def describe_encoder(spec: ComponentSpec) -> EncoderInfo:
    """Loads an encoder and describes it."""
    with within("encoder"):
        return EncoderInfo.from_encoder(ENCODERS.build(spec), spec)


@ray.remote
def remarks(spec: IndexSpec) -> list[str]:
    """Returns sentences about unused inputs and unsuitable settings of an index job."""

    def ids() -> Iterator[str]:
        index = Index(spec.index)
        for batch in index.batches(["item_id", "parent_id"], batch_rows=65_536):
            for column in batch.columns:
                yield from column.to_pylist()
        yield from index.rejects()["item_id"].to_pylist()

    sentences = ENCODERS.load(spec.encoder.name).warnings(spec.encoder, ids)
    dataset = Index(spec.index).dataset
    return [*sentences, *compressor_remarks(dataset, every_representation(spec))]


@ray.remote
def truncated_files(spec: IndexSpec) -> list[str]:
    """Returns the truncated files of a spec's source, each with how much of it can be read."""
    parts = SOURCES.load(spec.source.name).leaf_specs(spec.source)
    if not any({"frames", "audio"} & set(SOURCES.load(part.name).provides) for part in parts):
        return []
    names = ", ".join(map(quote, spec.build_source().collections))
    rows = Index(spec.index).batches(
        ["parent_id", "metadata"],
        filter=f"""source IN ({names}) AND metadata LIKE '%"truncated": true%'""",
    )
    files = {row["parent_id"]: json.loads(row["metadata"]) for b in rows for row in b.to_pylist()}
    return [
        f"{name} ({metadata['duration']:g}"
        + (f" of {metadata['stated_duration']:g}" if "stated_duration" in metadata else "")
        + " s)"
        for name, metadata in sorted(files.items())
    ]


@ray.remote
def fit_representation(
    job: ListingJob,
    num_shards: int,
    drawn: FitSample,
    stage: Encode,
    representation: Representation,
) -> Learned:
    """Draws a sample of the listed items, encodes it and fits a representation on it.

    Raises:
        SpecError: The source has no item that can be read, or too few.
    """
    encoder = stage.load()
    taps = COMPRESSORS.build(representation.compressor).needs_taps
    hashes: set[int] = set()

    def sample() -> Iterator[TokenBatch]:
        for items in unit_reader.sample_items(job, num_shards, drawn.num_items, drawn.seed):
            for prepared in _readable(encoder, items):
                content_N = listing.content_hashes(prepared)
                for _, rows, batch, _ in encoder.batches(prepared):
                    if len(batch):
                        hashes.update(content_N[rows].tolist())
                        yield with_taps(batch, taps, stage.encoder_info)
        if not hashes:
            rule = "a source with at least one readable item"
            problem = f"has none to fit {representation.id} on"
            field = "fit.source" if drawn.source else "source"
            raise SpecError(field, job.source.name, rule, problem)

    learned = fit(representation, sample, drawn.seed)
    origin = {"source": dump(drawn.source)} if drawn.source else {}
    return learned._replace(sample=Sample(origin, np.array(sorted(hashes), np.uint64)))


def _readable(encoder: TokenEncoder, items: pa.Table) -> Iterator[pa.Table]:
    """Yields the prepared items, without those that cannot be read."""
    try:
        yield encoder.prepare(items)[0]
        return
    except Unreadable:
        pass
    for row in range(items.num_rows):
        with contextlib.suppress(Unreadable):
            yield encoder.prepare(items.slice(row, 1))[0]
