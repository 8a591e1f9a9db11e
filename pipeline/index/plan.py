"""The column plan of an index job: what its spec asks for beside what the index has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index.checks import refuse_other_encoders
from pipeline.index.columns import (
    RERANK_TOKENS,
    Representation,
    every_representation,
    other_setting,
    refuse_other_settings,
)
from pipeline.index.fitting import Learned, stored_learned
from pipeline.index.info import (
    EncoderInfo,
    RepresentationInfo,
    RerankInfo,
    columns_with_role,
    representation_infos,
)
from pipeline.index.rerank_tokens import refuse_other_adapter, rerank_field
from pipeline.index.spec import IndexSpec
from pipeline.index.stream import encoder_columns
from pipeline.index.writer import IndexWriter
from pipeline.schema import column_metadata


@dataclass(frozen=True)
class ColumnPlan:
    """The columns of the index, and those that are missing.

    Attributes:
        encoder_info: The encoder, without its weights.
        learned: Learned state of the stored representations, by id.
        added: Representations without a column.
        encoder_columns: Names of the encoder's own columns that are filled.
        encoder_fields: Those of them that the index lacks.
        rerank_fields: The column of an EDJE's tokens, if it is wanted and the index lacks it.
    """

    encoder_info: EncoderInfo
    learned: Mapping[str, Learned]
    added: tuple[Representation, ...]
    encoder_columns: tuple[str, ...]
    encoder_fields: tuple[pa.Field, ...]
    rerank_fields: tuple[pa.Field, ...]


def plan_columns(spec: IndexSpec, encoder_info: EncoderInfo, writer: IndexWriter) -> ColumnPlan:
    """Compares the columns of the spec with those of the index.

    Columns that a run with another spec added to an index without rows are dropped.

    Raises:
        SpecError: A column was made by another encoder or with other settings, or is missing from
            an index that already has rows.
    """
    wanted = every_representation(spec)
    rerank = [rerank_field(spec.rerank, encoder_info)] if spec.rerank else []
    is_empty = writer.dataset.count_rows() == 0
    if is_empty and not _has_columns(writer.dataset.schema, encoder_info, wanted, rerank):
        writer.drop_columns()  # of a run with another spec that committed nothing
    schema = writer.dataset.schema
    refuse_other_encoders(schema, encoder_info)
    added = [r for r in wanted if r.id not in schema.names]
    if added and not is_empty:
        raise SpecError(
            "representations",
            added[0].id,
            f"one of {', '.join(columns_with_role(schema, 'search'))}",
            "is not in this index, which has rows",
            f"; add it with `python -m jobs.recompress {spec.index}`, then resume indexing",
        )
    if spec.rerank and RERANK_TOKENS in schema.names:
        refuse_other_adapter(spec.rerank, RerankInfo.from_schema(schema, RERANK_TOKENS))
        rerank = []
    elif rerank and not is_empty:
        problem = f"would add {RERANK_TOKENS} to an index that has rows"
        note = "; add it with `python -m jobs.backfill` and this spec, then resume indexing"
        raise SpecError("rerank", spec.rerank, "null", problem, note)
    learned = {}
    for r in wanted:
        if r.id in schema.names:
            stored = RepresentationInfo.from_schema(schema, r.id)
            refuse_other_settings(r, encoder_info, stored)
            learned[r.id] = stored_learned(spec.index, stored)
    own = encoder_columns(spec, encoder_info)
    missing = [column for column in own if column.name not in schema.names]
    for column in missing:
        tap = column_metadata(column).get("tap")
        if tap and not is_empty:
            rule = "attention that the index stores, unless the index is new"
            raise SpecError("keep_taps", tap, rule, "is not in this index")
    return ColumnPlan(
        encoder_info,
        learned,
        tuple(added),
        tuple(column.name for column in own if is_empty or column.name in schema.names),
        tuple(missing if is_empty else ()),
        tuple(rerank),
    )


def _has_columns(
    schema: pa.Schema,
    encoder_info: EncoderInfo,
    wanted: list[Representation],
    rerank: list[pa.Field],
) -> bool:
    """Returns whether a schema has exactly the wanted columns, with the same settings."""
    stored = representation_infos(schema)
    stored_rerank = [schema.field(name) for name in columns_with_role(schema, "rerank")]
    if [column_metadata(column) for column in stored_rerank] != [
        column_metadata(c) for c in rerank
    ]:
        return False
    return set(stored) == {r.id for r in wanted} and not any(
        other_setting(r, encoder_info, stored[r.id]) for r in wanted
    )
