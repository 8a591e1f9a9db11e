"""Backfill: the column `rerank_tokens` of the existing rows of an index.

Items are encoded again in the units of the index job, so that the tokens equal those the index job
would have written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lance
import pyarrow as pa

from pipeline.config import MissingField, SpecError
from pipeline.index import listing, tasks, unit_reader
from pipeline.index.add import AddedColumns, Progress, Work
from pipeline.index.checks import check, check_same_encoder
from pipeline.index.columns import RERANK_TOKENS, all_representations
from pipeline.index.filling import FragmentActor
from pipeline.index.info import RerankInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import IndexReader, get_fragment
from pipeline.index.rerank_tokens import check_same_adapter, rerank_field
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import Stage, run_stage
from pipeline.index.stages import Compress, Represent
from pipeline.index.stream import encode_stage

#: Number of fragments per commit.
COMMIT_FRAGMENTS = 8
WITHOUT_TOKENS = f"`{RERANK_TOKENS}` IS NULL"


class CacheFragment(FragmentActor):
    """Actor that encodes the items without tokens of fragments."""

    step, columns = "encode", (RERANK_TOKENS,)

    def __init__(
        self,
        index: str,
        version: int,
        listed: ListingJob,
        shards: dict[int, list[int]],
        stage: Stage,
    ):
        super().__init__(index, version)
        self.listed, self.shards, self.stage = listed, shards, stage.load()

    def read(self, fragment: lance.LanceFragment) -> pa.Table:
        """Reads the ids of the items that have no tokens yet."""
        return fragment.to_table(columns=["item_id"], filter=WITHOUT_TOKENS, with_row_id=True)

    def compute(self, number: int, table: pa.Table) -> tuple[pa.Table, int]:
        """Reads the items from their source and encodes them."""
        row_ids = dict(zip(table["item_id"].to_pylist(), table["_rowid"].to_pylist(), strict=True))
        tables, num_tried = [self.schema.empty_table()], 0
        for shard in self.shards[number]:
            units = unit_reader.stored_units(self.listed, shard, number, row_ids)
            for unit, num_unread in units:
                num_tried += unit.items.num_rows + num_unread
                items = run_stage(self.stage, unit).items
                if RERANK_TOKENS in items.column_names:
                    items = items.filter(items[RERANK_TOKENS].is_valid())
                    rows = pa.array([row_ids[i] for i in items["item_id"].to_pylist()], pa.uint64())
                    filled = pa.table([rows, items[RERANK_TOKENS]], names=self.schema.names)
                    tables.append(filled.cast(self.schema))
        filled = pa.concat_tables(tables)
        return filled, num_tried - filled.num_rows


class Backfill(AddedColumns):
    """Tokens of the adapter of an EDJE, which are stored for reranking.

    Raises:
        SpecError: The index or the spec is invalid.
    """

    kind, actor = "backfill", CacheFragment
    title = "rerank tokens"
    spec: IndexSpec
    resources: IndexResources

    def __init__(self, spec: IndexSpec, resources: IndexResources):
        super().__init__(spec.index, spec, resources, resources.encode, COMMIT_FRAGMENTS)
        check(spec)
        if spec.rerank is None:
            raise MissingField("rerank", None, "the folder of an EDJE (rerank=FOLDER)")
        self.rerank = spec.rerank
        if not len(IndexReader(spec.index)):
            note = "; run `maxray index` with this spec first"
            raise SpecError("index", spec.index, "an index with items", "is empty", note)

    def prepare(self, session: Session, report: Callable[[str], None]) -> list[Work]:
        """Adds the column, and lists the source to find the items without tokens."""
        writer, resources = session.writer, self.resources
        with session.monitor.phase("load encoder"):
            describe = tasks.describe_encoder, self.spec.encoder
            encoder_info = session.run(resources.encode, *describe)
        column = rerank_field(self.rerank, encoder_info)
        check_same_encoder(writer.dataset.schema, encoder_info)
        if RERANK_TOKENS in writer.dataset.schema.names:
            stored = RerankInfo.from_schema(writer.dataset.schema, RERANK_TOKENS)
            check_same_adapter(self.rerank, stored)
        else:
            writer.add_columns([column])
        writer.index_ids()
        listed = self.spec.listing_job(session.folder)
        with session.monitor.phase("list"):
            shards = _shards_by_fragment(session, listed, resources)
        incomplete = []
        for fragment in shards:
            session.check()
            if get_fragment(writer.dataset, fragment).count_rows(WITHOUT_TOKENS):
                incomplete.append(fragment)
        content = [r for r in all_representations(self.spec) if r.field == "content"]
        placement = resources.placement
        encode = encode_stage(self.spec, encoder_info, content, rerank=True, placement=placement)
        stage = Represent(encode, Compress(encoder_info, [], {}, ()))  # adds the tokens only
        arguments = {"listed": listed, "shards": shards, "stage": stage}
        return [Work(incomplete, arguments)] if incomplete else []

    def finish(self, session: Session, progress: Progress, report: Callable[[str], None]) -> None:
        """Reports the number of items without tokens."""
        if progress.empty:
            report(
                f"{progress.empty:,} items have no tokens: they cannot be read,"
                " or the adapter returns none for them"
            )


def _shards_by_fragment(
    session: Session, listed: ListingJob, resources: IndexResources
) -> dict[int, list[int]]:
    results = tasks.list_shards(session, resources.read, listed, function=_list_shard)
    shards: dict[int, list[int]] = {}
    for shard, fragments in results:
        for fragment in fragments:
            shards.setdefault(fragment, []).append(shard)
    return {fragment: sorted(shards[fragment]) for fragment in sorted(shards)}


def _list_shard(
    listed: ListingJob, shard: int, description: dict[str, Any]
) -> tuple[int, list[int]]:
    """Returns the number of the shard and the fragments that contain its unchanged rows."""
    listing.list_shard(listed, shard, description)
    return shard, unit_reader.stored_fragments(listed, shard)
