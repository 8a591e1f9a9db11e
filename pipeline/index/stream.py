"""Data stream of the index job: Ray Data reads, encodes, compresses and writes units."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data.block import DataBatch

from pipeline.data.decode.process import keep_memory
from pipeline.index import unit_reader
from pipeline.index.columns import (
    Representation,
    all_representations,
    encoder_fields,
    needs_appended_vectors,
    represented_fields,
    required_taps,
)
from pipeline.index.fitting import LearnedState
from pipeline.index.fragments import WriteFragments
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import part_uri
from pipeline.index.session import configure_ray_data
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import Resources, Stage, Unit, chain, map_batches, packed_table
from pipeline.index.stages import Compress, Encode, Prepare, Represent, needs_preparing
from pipeline.index.units import UnitRange
from pipeline.runtime.progress import meter
from pipeline.schema import ITEM
from pipeline.taps import Tap, single_layer_taps


def stored_taps(spec: IndexSpec, encoder_info: EncoderInfo) -> tuple[Tap, ...]:
    """Returns the single-layer attention statistics that the index stores."""
    return single_layer_taps(map(Tap.parse, spec.keep_taps), encoder_info.num_layers or 0)


def encoder_columns(spec: IndexSpec, encoder_info: EncoderInfo) -> list[pa.Field]:
    """Returns the columns of the encoder that all representations share."""
    item_fields = represented_fields(all_representations(spec))
    taps = stored_taps(spec, encoder_info)
    return [
        column
        for name in item_fields
        for column in encoder_fields(encoder_info.for_field(name), spec.keep_positions, taps)
    ]


def encode_stage(
    spec: IndexSpec,
    encoder_info: EncoderInfo,
    representations: Sequence[Representation],
    *,
    rerank: bool = False,
    prepare: bool = True,
    placement: Mapping[str, Any] | None = None,
) -> Encode:
    """Builds the stage that encodes items for representations and shared columns.

    Args:
        rerank: Whether to add the adapter tokens of the spec's EDJE.
        prepare: Whether the stage prepares the items itself.
        placement: Options of the encoder's constructor that place its weights on devices.
    """
    return Encode(
        spec.encoder,
        encoder_info,
        represented_fields(representations),
        sorted(
            {
                *required_taps(representations, encoder_info.num_layers),
                *stored_taps(spec, encoder_info),
            }
        ),
        needs_appended_vectors(representations),
        spec.rerank if rerank else None,
        prepare,
        placement or {},
    )


def read_units(
    listing_job: ListingJob,
    ranges: Sequence[UnitRange],
    pool: Resources,
    job: str | None = None,
) -> ray.data.Dataset:
    """Returns a lazy dataset of packed units. A Ray task reads each range of units."""
    return unit_dataset(partial(unit_reader.read_units, listing_job), ranges, pool, job)


def unit_dataset(
    read: Callable[[UnitRange], Iterator[Unit]],
    ranges: Sequence[UnitRange],
    pool: Resources,
    job: str | None = None,
) -> ray.data.Dataset:
    """Returns a lazy dataset of the units that a function reads, in a Ray task per range."""

    def read_block(block: DataBatch) -> Iterator[pa.Table]:
        keep_memory()
        started, start = time.time(), time.perf_counter()
        for values in zip(*(block[name].tolist() for name in UnitRange._fields), strict=True):
            for unit in read(UnitRange(*values)):
                unit.starts["read"], unit.seconds["read"] = started, time.perf_counter() - start
                if job is not None:
                    meter(job).add("read", unit.num_entries, 1, unit.seconds["read"])
                yield packed_table([unit])
                started, start = time.time(), time.perf_counter()

    rows = [units._asdict() for units in ranges]
    return ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        read_block,
        batch_size=None,
        compute=ray.data.TaskPoolStrategy(size=min(pool.max_actors, len(rows))),
        **pool.task_options,
    )


def write_units(
    units: ray.data.Dataset,
    index: str,
    pool: Resources,
    units_per_fragment: int,
    fragment_bytes: int,
    job: str | None = None,
) -> ray.data.Dataset:
    """Returns a lazy dataset with one row (`fragments.WRITTEN`) per group of units."""
    return map_batches(
        units,
        WriteFragments,
        {"index": index, "max_bytes": fragment_bytes, "job": job},
        pool,
        batch_size=max(1, units_per_fragment),
        batch_format="pyarrow",
        zero_copy_batch=True,
    )


def written_fragments(
    spec: IndexSpec,
    resources: IndexResources,
    listing_job: ListingJob,
    ranges: Sequence[UnitRange],
    encoder_info: EncoderInfo,
    learned: Mapping[str, LearnedState],
    stored_columns: Sequence[str],
    job: str | None = None,
) -> ray.data.Dataset:
    """Returns a lazy dataset with one row (`fragments.WRITTEN`) per fragment that was written."""
    configure_ray_data(resources)
    representations = all_representations(spec)
    item_fields = represented_fields(representations)
    groups: list[tuple[list[Stage], Resources]] = []
    prepare = resources.prepare if needs_preparing(spec.encoder, item_fields) else None
    if prepare is not None:
        groups.append(([Prepare(spec.encoder)], prepare))
    encode = encode_stage(
        spec,
        encoder_info,
        representations,
        rerank=True,
        prepare=prepare is None,
        placement=resources.placement,
    )
    compress = Compress(encoder_info, representations, learned, stored_columns)
    if resources.compress is None:
        groups.append(([Represent(encode, compress)], resources.encode))
    else:
        groups += [([encode], resources.encode), ([compress], resources.compress)]
    units = read_units(listing_job, ranges, resources.read, job)
    payload = listing_job.build_source().payload
    processed = chain(units, groups, [*ITEM.names, *payload.names], job)
    # Of large items, a fragment has fewer: they should not wait long for their commit.
    num_units = spec.fragment_items // spec.unit_items
    return write_units(
        processed, part_uri(spec.index), resources.write, num_units, spec.fragment_bytes, job
    )
