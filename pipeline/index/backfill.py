"""Backfill job: adds the column `rerank_tokens` to the existing rows of an index.

Items are read and encoded again in the units of the index job, so that the tokens equal those the
index job would have written. The job processes the rows without tokens whose source item is
unchanged, fragment by fragment. It is resumable and modifies no other column.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import ray

from pipeline.config import MissingField, SpecError
from pipeline.index import listing, tasks, unit_reader
from pipeline.index.capacity import check_capacity
from pipeline.index.checks import check, check_same_encoder
from pipeline.index.columns import RERANK_TOKENS, all_representations
from pipeline.index.fill import FilledFragment, Progress, commit_filled, fill_fragments
from pipeline.index.info import RerankInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import Index, get_fragment, part_uri
from pipeline.index.rerank_tokens import check_same_adapter, rerank_field
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stages import ColumnCollector, Encode, TokenEncoder
from pipeline.index.stream import encode_stage
from pipeline.schema import ITEM
from pipeline.stage import LoadedStage, Processed, Stage, run_stage

log = logging.getLogger("maxray.backfill")

#: Number of fragments per commit.
COMMIT_FRAGMENTS = 8
WITHOUT_TOKENS = f"`{RERANK_TOKENS}` IS NULL"


def run(
    spec: IndexSpec,
    resources: IndexResources,
    *,
    job_id: str,
    report: Callable[[str], None] = log.info,
    lease_seconds: float | None = None,
) -> Progress:
    """Runs the job until all fragments have been filled. Ray must be connected to a cluster.

    Args:
        spec: Spec of the index job, with `rerank`.
        resources: Resources profile of the index job.
        job_id: Identifier of the job.
        report: Called with each sentence about the job.
        lease_seconds: Lifetime of the lease without renewal, see `Session`.

    Raises:
        SpecError: The index, its source or the EDJE is invalid or uses another encoder.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. Finished work is committed and the lease is released.
    """
    check(spec)
    check_capacity(resources)
    if spec.rerank is None:
        raise MissingField("rerank", None, "the folder of an EDJE (rerank=FOLDER)")
    if not len(Index(spec.index)):
        note = "; run `maxray index` with this spec first"
        raise SpecError("index", spec.index, "an index with items", "is empty", note)
    progress = Progress(seconds={"encode": 0.0, "write": 0.0})
    with Session(spec.index, spec, "backfill", job_id, progress.summary, lease_seconds) as session:
        writer = session.writer
        load = tasks.describe_encoder.options(**resources.encode.task_options)
        with session.monitor.phase("load encoder"):
            encoder_info = session.call(ray.get, load.remote(spec.encoder))
        column = rerank_field(spec.rerank, encoder_info)
        check_same_encoder(writer.dataset.schema, encoder_info)
        if RERANK_TOKENS in writer.dataset.schema.names:
            stored = RerankInfo.from_schema(writer.dataset.schema, RERANK_TOKENS)
            check_same_adapter(spec.rerank, stored)
        else:
            writer.add_columns([column])
        writer.index_ids()
        listed = spec.listing_job(session.folder)
        with session.monitor.phase("list"):
            shards_by_fragment = _shards_by_fragment(session, listed, resources)
        dataset = writer.dataset
        incomplete = []
        for fragment in shards_by_fragment:
            session.check()
            if get_fragment(dataset, fragment).count_rows(WITHOUT_TOKENS):
                incomplete.append(fragment)
        progress.fragments = len(dataset.get_fragments())
        progress.done_before = progress.fragments - len(incomplete)
        report(f"{len(incomplete)} of {progress.fragments} fragments have items without tokens")
        content = [r for r in all_representations(spec) if r.field == "content"]
        encode = encode_stage(
            spec, encoder_info, content, rerank=True, placement=resources.placement
        )
        constructor_kwargs = {
            "index": part_uri(spec.index),
            "version": writer.dataset.version,
            "listed": listed,
            "stage": CacheTokens(encode),
            "num_threads": resources.encode.num_threads,
        }
        rows = [{"fragment": f, "shards": json.dumps(shards_by_fragment[f])} for f in incomplete]
        if rows:
            filled = fill_fragments(
                CacheFragment, constructor_kwargs, rows, resources.encode, resources
            )
            commit_filled(session, filled, resources.encode, COMMIT_FRAGMENTS, progress, report)
        if progress.empty:
            report(
                f"{progress.empty:,} items have no tokens: they cannot be read,"
                " or the adapter returns none for them"
            )
    return progress


def _shards_by_fragment(
    session: Session, listed: ListingJob, resources: IndexResources
) -> dict[int, list[int]]:
    """Maps each fragment to the shards of the source that contain its unchanged rows."""
    read = resources.read
    task = _list_shard.options(**read.task_options)
    results = tasks.list_shards(listed, None, read.max_actors, session.check, task)
    shards: dict[int, list[int]] = {}
    for shard, fragments in results:
        for fragment in fragments:
            shards.setdefault(fragment, []).append(shard)
    return {fragment: sorted(shards[fragment]) for fragment in sorted(shards)}


@ray.remote
def _list_shard(
    listed: ListingJob, shard: int, description: dict[str, Any]
) -> tuple[int, list[int]]:
    """Lists a shard. Returns its number and the fragments that contain its unchanged rows."""
    listing.list_shard(listed, shard, description)
    return shard, unit_reader.stored_fragments(listed, shard)


@dataclass(frozen=True)
class CacheTokens(Stage):
    """Stage that computes the tokens of an EDJE adapter. It adds no other column."""

    encode: Encode

    name: ClassVar[str] = "rerank"

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the items must have."""
        return self.encode.needs

    @property
    def adds(self) -> tuple[str, ...]:
        """Columns that the stage adds."""
        return self.encode.adds_for_rerank

    def load(self) -> TokenCacher:
        """Loads the encoder and the adapter."""
        return TokenCacher(self.encode.load())


class TokenCacher(LoadedStage):
    """A loaded `CacheTokens`."""

    name = CacheTokens.name

    def __init__(self, encoder: TokenEncoder):
        self._encoder = encoder

    def process(self, items: pa.Table) -> Processed:
        """Returns the items with the adapter's tokens."""
        items, _ = self._encoder.prepare(items)
        collector = ColumnCollector()
        for encoded in self._encoder.batches(items):
            table = pa.table({RERANK_TOKENS: self._encoder.rerank_tokens(encoded.batch)})
            collector.add(encoded.item_field, encoded.rows, table, encoded.problems)
        item_fields, empty_reason = self._encoder.stage.item_fields, self._encoder.empty_reason
        return Processed(*collector.join(items.select(ITEM.names), item_fields, empty_reason))


class CacheFragment:
    """Actor that encodes the items without tokens of a fragment and writes the column's file."""

    def __init__(
        self,
        index: str,
        version: int,
        listed: ListingJob,
        stage: CacheTokens,
        num_threads: int,
    ):
        import torch

        torch.set_num_threads(num_threads)
        self.index, self.listed = Index(index, version), listed
        self.stage = stage.load()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[str]]:
        """Fills the fragments of a batch and returns the JSON of a `FilledFragment` for each."""
        rows = zip(batch["fragment"], batch["shards"], strict=True)
        filled = [self.fill(int(number), json.loads(shards)) for number, shards in rows]
        return {"filled": [fragment.to_json() for fragment in filled]}

    def fill(self, number: int, shards: list[int]) -> FilledFragment:
        """Fills all rows of a fragment that have no tokens yet.

        Args:
            number: Fragment of the index.
            shards: Shards of the source with items of the fragment.
        """
        start = time.perf_counter()
        fragment = get_fragment(self.index.dataset, number)
        with self.index.corruption_errors():
            table = fragment.to_table(columns=["item_id"], filter=WITHOUT_TOKENS, with_row_id=True)
        row_ids = dict(zip(table["item_id"].to_pylist(), table["_rowid"].to_pylist(), strict=True))
        tables, num_tried = [], 0
        for shard in shards:
            units = unit_reader.stored_units(self.listed, shard, number, row_ids)
            for unit, num_unread in units:
                num_tried += unit.items.num_rows + num_unread
                items = run_stage(self.stage, unit).items
                if RERANK_TOKENS in items.column_names:
                    has_tokens = items[RERANK_TOKENS].is_valid()
                    tables.append(items.filter(has_tokens).select(["item_id", RERANK_TOKENS]))
        num_filled = sum(table.num_rows for table in tables)
        encoded = time.perf_counter()
        written: Any = None
        modified: list[int] = []
        if num_filled:
            filled = pa.concat_tables(tables)
            rows = pa.array([row_ids[i] for i in filled["item_id"].to_pylist()], pa.uint64())
            field = self.index.schema.field(RERANK_TOKENS)
            columns = pa.schema([pa.field("_rowid", pa.uint64()), field])
            filled = pa.table([rows, filled[RERANK_TOKENS]], names=columns.names).cast(columns)
            metadata, modified = fragment.update_columns(filled)
            written = metadata.to_json()
        seconds = {"encode": encoded - start, "write": time.perf_counter() - encoded}
        num_empty = num_tried - num_filled
        return FilledFragment(written, modified, num_filled, num_empty, seconds, number)
