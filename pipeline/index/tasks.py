"""Functions of the index job that an executor runs, on Ray as tasks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.config import ComponentSpec, SpecError, dump, within
from pipeline.encoders.shared import load_encoder
from pipeline.index import listing, unit_reader
from pipeline.index.artefacts import Sample
from pipeline.index.columns import Representation, all_representations, compressor_remarks
from pipeline.index.fitting import LearnedState, fit
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import IndexReader, quote
from pipeline.index.session import Session
from pipeline.index.spec import FitSample, IndexSpec
from pipeline.index.stage import Resources
from pipeline.index.stages import Encode
from pipeline.index.token_columns import with_taps
from pipeline.registry import COMPRESSORS, ENCODERS, SOURCES
from pipeline.tokens import TokenBatch

#: Shards per message of the planning function.
PLANNED_SHARDS = 8


def planned(job: ListingJob) -> Iterator[list[dict[str, Any]]]:
    """Yields groups of the shards of a source."""
    yield from listing.chunks(listing.plan(job), PLANNED_SHARDS)


def list_shards(
    session: Session,
    pool: Resources,
    job: ListingJob,
    limit: int | None = None,
    function: Callable[..., Any] = listing.list_shard,
) -> Iterator[Any]:
    """Plans and lists a source, and yields the results of the shards in the order of completion.

    Args:
        limit: Maximum number of items, in listing order. With a limit, shards are listed one after
            another until it is reached.
        function: Called with the job, the number of a shard and its description.
    """
    messages = session.executor.iterate(planned, (job,), session.check)
    shards = enumerate(itertools.chain.from_iterable(messages))
    if limit is None:
        arguments = ((job, n, {"shard": shard, "limit": None}) for n, shard in shards)
        yield from session.executor.map(pool, function, arguments, session.check)
        return
    while limit and (following := next(shards, None)) is not None:
        number, shard = following
        tally = session.run(pool, function, job, number, {"shard": shard, "limit": limit})
        limit -= tally.num_entries
        session.check()
        yield tally


def describe_encoder(spec: ComponentSpec, see: ComponentSpec | None = None) -> EncoderInfo:
    """Loads an encoder, and that of images if there is one, and returns its info."""
    with within("encoder"):
        info = EncoderInfo.from_encoder(load_encoder(spec), spec)
    if see is None:
        return info
    with within("see"):
        return replace(info, see=EncoderInfo.from_encoder(load_encoder(see), see))


def remarks(spec: IndexSpec) -> list[str]:
    """Returns warnings about inputs that are not used and settings that are not suitable."""

    def ids() -> Iterator[str]:
        index = IndexReader(spec.index)
        for batch in index.batches(["item_id", "parent_id"], batch_rows=65_536):
            for column in batch.columns:
                yield from column.to_pylist()
        yield from index.rejects()["item_id"].to_pylist()

    sentences = ENCODERS.load(spec.encoder.name).warnings(spec.encoder, ids)
    dataset = IndexReader(spec.index).dataset
    return [*sentences, *compressor_remarks(dataset, all_representations(spec))]


def has_media(spec: IndexSpec) -> bool:
    """Returns True if the source of a spec provides video frames or audio."""
    parts = SOURCES.load(spec.source.name).leaf_specs(spec.source)
    provided = {name for p in parts for name in SOURCES.load(p.name).provided_inputs(p)}
    return bool(provided & {"frames", "audio"})


def truncated_files(spec: IndexSpec) -> list[str]:
    """Returns the truncated files in the source of a spec and their readable duration."""
    names = ", ".join(map(quote, spec.build_source().collections))
    rows = IndexReader(spec.index).batches(
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


def fit_representation(
    job: ListingJob,
    num_shards: int,
    fit_sample: FitSample,
    stage: Encode,
    representation: Representation,
) -> LearnedState:
    """Fits a representation to a sample of the listed items, if enough are readable."""
    encoder = stage.load()
    taps = COMPRESSORS.build(representation.compressor).needs_taps
    hashes: set[int] = set()

    def sample() -> Iterator[TokenBatch]:
        for items in unit_reader.sample_items(
            job, num_shards, fit_sample.num_items, fit_sample.seed
        ):
            for _, prepared in encoder.readable(items, np.arange(items.num_rows)):
                content_N = listing.content_hashes(prepared)
                for _, rows, batch, _ in encoder.batches(prepared):
                    if len(batch):
                        hashes.update(content_N[rows].tolist())
                        yield with_taps(batch, taps, stage.encoder_info)
        if not hashes:
            rule = "a source with at least one readable item"
            problem = f"has no items on which {representation.id} can be fitted"
            field = "fit.source" if fit_sample.source else "source"
            raise SpecError(field, job.source.name, rule, problem)

    learned = fit(representation, stage.encoder_info, sample, fit_sample.seed)
    origin = {"source": dump(fit_sample.source)} if fit_sample.source else {}
    return learned._replace(sample=Sample(origin, np.array(sorted(hashes), np.uint64)))
