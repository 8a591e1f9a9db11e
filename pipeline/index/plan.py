"""Comparison of the columns that an index job requires with those that the index has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from pipeline.config import SpecError
from pipeline.index.checks import check_same_encoder
from pipeline.index.columns import (
    RERANK_TOKENS,
    Representation,
    all_representations,
    changed_setting,
    check_same_settings,
    encoder_fields,
)
from pipeline.index.fitting import LearnedState, load_learned_state
from pipeline.index.info import (
    EncoderInfo,
    RepresentationInfo,
    RerankInfo,
    columns_with_role,
    representation_infos,
)
from pipeline.index.rerank_tokens import check_same_adapter, rerank_field
from pipeline.index.spec import IndexSpec
from pipeline.index.stream import encoder_columns
from pipeline.index.writer import IndexWriter
from pipeline.schema import column_metadata


@dataclass(frozen=True)
class ColumnPlan:
    """Columns that an index job fills, and those that it must add first.

    Attributes:
        learned: Learned state of the stored representations, by id.
        added: Representations to add to the index.
        encoder_columns: Names of the shared columns of the encoder that are filled.
        encoder_fields: Shared columns of the encoder to add.
        rerank_fields: Column of the EDJE tokens, if it is to be added.
    """

    encoder_info: EncoderInfo
    learned: Mapping[str, LearnedState]
    added: tuple[Representation, ...]
    encoder_columns: tuple[str, ...]
    encoder_fields: tuple[pa.Field, ...]
    rerank_fields: tuple[pa.Field, ...]


def plan_columns(spec: IndexSpec, encoder_info: EncoderInfo, writer: IndexWriter) -> ColumnPlan:
    """Compares the columns of the spec with those of the index.

    Raises:
        SpecError: A column has another encoder or other settings, or is missing from an index that
            already has rows.
    """
    wanted = all_representations(spec)
    rerank = [rerank_field(spec.rerank, encoder_info)] if spec.rerank else []
    is_empty = writer.dataset.count_rows() == 0
    if is_empty and not _has_columns(writer.dataset.schema, encoder_info, wanted, rerank):
        writer.drop_columns()  # a run with another spec added them and committed no rows
    schema = writer.dataset.schema
    check_same_encoder(schema, encoder_info)
    added = [r for r in wanted if r.id not in schema.names]
    # Items with images have other revisions, so this job encodes those of the index again.
    absent = [r for r in added if r.field != "image"]
    if absent and not is_empty:
        rule = f"one of {', '.join(columns_with_role(schema, 'search'))}"
        note = f"; add it with `maxray add representations {spec.index}`, then resume indexing"
        raise SpecError("representations", absent[0].id, rule, "is not in this index", note)
    if spec.rerank and RERANK_TOKENS in schema.names:
        check_same_adapter(spec.rerank, RerankInfo.from_schema(schema, RERANK_TOKENS))
        rerank = []
    elif rerank and not is_empty:
        problem = f"requires the column {RERANK_TOKENS}, which this index lacks"
        note = "; add it with `maxray add tokens` and this spec, then resume indexing"
        raise SpecError("rerank", spec.rerank, "null for this index", problem, note)
    learned = {}
    for r in wanted:
        if r.id in schema.names:
            stored = RepresentationInfo.from_schema(schema, r.id)
            check_same_settings(r, encoder_info, stored)
            learned[r.id] = load_learned_state(spec.index, stored)
    shared = encoder_columns(spec, encoder_info)
    missing = [column for column in shared if column.name not in schema.names]
    for column in missing:
        tap = column_metadata(column).get("tap")
        if tap and not is_empty:
            rule = "an attention statistic that the index stores"
            raise SpecError("keep_taps", tap, rule, "can only be added while the index is empty")
    if not is_empty:
        see = encoder_fields(encoder_info.for_field("image"), spec.keep_positions) if added else []
        missing = [column for column in missing if column in see]
    return ColumnPlan(
        encoder_info,
        learned,
        tuple(added),
        tuple(column.name for column in shared if column in missing or column.name in schema.names),
        tuple(missing),
        tuple(rerank),
    )


def _has_columns(
    schema: pa.Schema,
    encoder_info: EncoderInfo,
    wanted: list[Representation],
    rerank: list[pa.Field],
) -> bool:
    stored = representation_infos(schema)
    stored_rerank = [schema.field(name) for name in columns_with_role(schema, "rerank")]
    if [column_metadata(column) for column in stored_rerank] != [
        column_metadata(c) for c in rerank
    ]:
        return False
    return set(stored) == {r.id for r in wanted} and not any(
        changed_setting(r, encoder_info, stored[r.id]) for r in wanted
    )
