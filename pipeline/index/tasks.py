"""Ray tasks of the index job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from pipeline.config import ComponentSpec, SpecError, dump, within
from pipeline.data.decode import Unreadable
from pipeline.index import listing, unit_reader
from pipeline.index.artefacts import Sample
from pipeline.index.columns import Representation, all_representations, compressor_remarks
from pipeline.index.fitting import LearnedState, fit
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import Index, quote
from pipeline.index.session import checked_call
from pipeline.index.spec import FitSample, IndexSpec
from pipeline.index.stages import Encode
from pipeline.index.token_columns import with_taps
from pipeline.registry import COMPRESSORS, ENCODERS, SOURCES
from pipeline.tokens import TokenBatch

list_shard = ray.remote(listing.list_shard)
mark_duplicates = ray.remote(listing.mark_duplicates)
unlisted_rejects = ray.remote(listing.unlisted_rejects)
stale_rows = ray.remote(listing.stale_rows)


#: Shards per message of the planning task, and messages that wait for the driver.
PLANNED_SHARDS, WAITING_MESSAGES = 8, 16


@ray.remote
def _plan(job: ListingJob) -> Iterator[list[dict[str, Any]]]:
    yield from listing.chunks(listing.plan(job), PLANNED_SHARDS)


def list_shards(
    job: ListingJob,
    limit: int | None,
    max_running: int,
    check: Callable[[], None],
    task: Any,
) -> Iterator[Any]:
    """Plans and lists a source, and yields the results of the shards in the order of completion.

    Args:
        limit: Maximum number of items, in listing order. With a limit, shards are listed one after
            another until it is reached.
    """
    # The task waits for the listing tasks, so it must not occupy their resources.
    options: dict[str, Any] = {"num_cpus": 0, "num_returns": "streaming"}
    options["_generator_backpressure_num_objects"] = WAITING_MESSAGES
    messages: Any = _plan.options(**options).remote(job)
    shards = enumerate(_shards(messages, check))
    if limit is None:
        arguments = ((number, {"shard": shard, "limit": None}) for number, shard in shards)
        yield from map_shards(task, job, arguments, max_running, check)
        return
    while limit and (planned := next(shards, None)) is not None:
        number, shard = planned
        call = task.remote(job, number, {"shard": shard, "limit": limit})
        tally = checked_call(check, ray.get, call)
        limit -= tally.num_entries
        check()
        yield tally
    if not limit:
        ray.cancel(messages)


def _shards(messages: Any, check: Callable[[], None]) -> Iterator[dict[str, Any]]:
    while (message := checked_call(check, next, messages, None)) is not None:
        yield from ray.get(message)


def map_shards(
    task: Any,
    job: ListingJob,
    arguments: Iterable[Sequence[Any]],
    max_running: int,
    check: Callable[[], None],
) -> Iterator[Any]:
    """Runs a task for each shard and yields the results in the order of completion.

    Args:
        max_running: Maximum number of concurrent tasks. Each starts a process, which on a small
            machine takes longer than the listing itself.
    """
    running: list[ray.ObjectRef] = []
    arguments = iter(arguments)
    while True:
        while len(running) < max_running and (values := next(arguments, None)) is not None:
            running.append(task.remote(job, *values))
        if not running:
            return
        ready, running = ray.wait(running, timeout=1.0)
        check()
        yield from ray.get(ready)


@ray.remote
def describe_encoder(spec: ComponentSpec) -> EncoderInfo:
    """Loads an encoder and returns its info."""
    with within("encoder"):
        return EncoderInfo.from_encoder(ENCODERS.build(spec), spec)


@ray.remote
def remarks(spec: IndexSpec) -> list[str]:
    """Returns warnings about inputs that are not used and settings that are not suitable."""

    def ids() -> Iterator[str]:
        index = Index(spec.index)
        for batch in index.batches(["item_id", "parent_id"], batch_rows=65_536):
            for column in batch.columns:
                yield from column.to_pylist()
        yield from index.rejects()["item_id"].to_pylist()

    sentences = ENCODERS.load(spec.encoder.name).warnings(spec.encoder, ids)
    dataset = Index(spec.index).dataset
    return [*sentences, *compressor_remarks(dataset, all_representations(spec))]


def has_media(spec: IndexSpec) -> bool:
    """Returns True if the source of a spec provides video frames or audio."""
    parts = SOURCES.load(spec.source.name).leaf_specs(spec.source)
    provided = {name for p in parts for name in SOURCES.load(p.name).provided_inputs(p)}
    return bool(provided & {"frames", "audio"})


@ray.remote
def truncated_files(spec: IndexSpec) -> list[str]:
    """Returns the truncated files in the source of a spec and their readable duration."""
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
    fit_sample: FitSample,
    stage: Encode,
    representation: Representation,
    num_threads: int,
) -> LearnedState:
    """Fits a representation to a sample of the listed items, if enough are readable."""
    torch.set_num_threads(num_threads)
    encoder = stage.load()
    taps = COMPRESSORS.build(representation.compressor).needs_taps
    hashes: set[int] = set()

    def sample() -> Iterator[TokenBatch]:
        for items in unit_reader.sample_items(
            job, num_shards, fit_sample.num_items, fit_sample.seed
        ):
            for prepared in _readable(encoder, items):
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


def _readable(encoder: Encode, items: pa.Table) -> Iterator[pa.Table]:
    try:
        yield encoder.prepared(items)
        return
    except Unreadable:
        pass
    for row in range(items.num_rows):
        with contextlib.suppress(Unreadable):
            yield encoder.prepared(items.slice(row, 1))
