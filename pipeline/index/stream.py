"""Stream of the index job: units are read, encoded, compressed and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from pipeline.index import unit_reader
from pipeline.index.columns import (
    Representation,
    all_representations,
    encoder_fields,
    needs_appended_vectors,
    represented_fields,
    required_taps,
)
from pipeline.index.executor import Stream
from pipeline.index.fitting import LearnedState
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import part_uri
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import Resources, Stage
from pipeline.index.stages import Compress, Encode, Prepare, Represent, needs_preparing
from pipeline.index.units import UnitRange
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
        for column in encoder_fields(
            encoder_info.for_field(name), spec.keep_positions, () if name == "image" else taps
        )
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
    fields = represented_fields(representations)
    return Encode(
        spec.encoder,
        encoder_info,
        fields,
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
        spec.see if "image" in fields else None,
    )


def index_stream(
    spec: IndexSpec,
    resources: IndexResources,
    listing_job: ListingJob,
    ranges: Sequence[UnitRange],
    encoder_info: EncoderInfo,
    learned: Mapping[str, LearnedState],
    stored_columns: Sequence[str],
    job: str | None = None,
) -> Stream:
    """Returns the stream of an index job, whose result is a `Pending` per written fragment."""
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
    payload = listing_job.build_source().payload
    return Stream(
        part_uri(spec.index),
        partial(unit_reader.read_units, listing_job),
        ranges,
        groups,
        [*ITEM.names, *payload.names],
        # Of large items, a fragment has fewer: they should not wait long for their commit.
        units_per_fragment=spec.fragment_items // spec.unit_items,
        fragment_bytes=spec.fragment_bytes,
        job=job,
    )
