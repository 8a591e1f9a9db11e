"""The column `rerank_tokens` of an index that has rows already: by fragment, resumable.

The items are read and encoded again, in the units of the index job, so that the tokens are those
that it would have written. What is left to do are the rows without tokens that the source still
has as they were indexed; no other column is touched.
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
from pipeline.index.checks import check, refuse_other_encoders
from pipeline.index.columns import RERANK_TOKENS, every_representation
from pipeline.index.fill import Filled, Progress, commit_filled, fill_fragments
from pipeline.index.info import RerankInfo
from pipeline.index.listing import ListingJob
from pipeline.index.reader import Index, get_fragment, part
from pipeline.index.rerank_tokens import refuse_other_adapter, rerank_field
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stages import Encode, Found, TokenEncoder
from pipeline.index.stream import encode_stage
from pipeline.schema import ITEM
from pipeline.stage import LoadedStage, Processed, Stage, run_stage

log = logging.getLogger("maxray.backfill")

#: The driver commits after so many fragments.
COMMIT_FRAGMENTS = 8
WITHOUT_TOKENS = f"`{RERANK_TOKENS}` IS NULL"


def run(
    spec: IndexSpec,
    resources: IndexResources,
    *,
    job_id: str,
    report: Callable[[str], None] = log.info,
    lease_seconds: float = 60.0,
) -> Progress:
    """Runs the job to its end in a Ray cluster that is connected already.

    Args:
        spec: Spec of the index job, with `rerank`.
        resources: Resources profile of the index job.
        job_id: Identifier of the job.
        report: Called with one progress line at a time.
        lease_seconds: Lifetime of the lease without renewal.

    Raises:
        SpecError: The index, its source or the EDJE is invalid, or has another encoder.
        LeaseHeld: Another job writes to the index.
        Stopped: SIGTERM arrived; finished work is committed and the lease is released.
    """
    check(spec)
    if spec.rerank is None:
        raise MissingField("rerank", None, "the folder of an EDJE (rerank=FOLDER)")
    if not len(Index(spec.index)):
        note = "; run `python -m jobs.index` with this spec first"
        raise SpecError("index", spec.index, "an index with rows", "is empty", note)
    progress = Progress(seconds={"encode": 0.0, "write": 0.0})
    with Session(spec.index, spec, "backfill", job_id, progress.summary, lease_seconds) as session:
        writer = session.writer
        load = tasks.describe_encoder.options(**resources.encode.task_options)
        encoder_info = ray.get(load.remote(spec.encoder))
        column = rerank_field(spec.rerank, encoder_info)
        refuse_other_encoders(writer.dataset.schema, encoder_info)
        if RERANK_TOKENS in writer.dataset.schema.names:
            stored = RerankInfo.from_schema(writer.dataset.schema, RERANK_TOKENS)
            refuse_other_adapter(spec.rerank, stored)
        else:
            writer.add_columns([column])
        writer.index_ids()
        listed = spec.listing_job(session.folder)
        shards_of = _fragments(session, listed, resources)
        dataset = writer.dataset
        lacking = [f for f in shards_of if get_fragment(dataset, f).count_rows(WITHOUT_TOKENS)]
        progress.fragments = len(dataset.get_fragments())
        progress.done_before = progress.fragments - len(lacking)
        report(f"{len(lacking)} of {progress.fragments} fragments have items without tokens")
        content = [r for r in every_representation(spec) if r.of == "content"]
        encode = encode_stage(
            spec, encoder_info, content, rerank=True, placement=resources.placement
        )
        given = {
            "index": part(spec.index),
            "version": writer.dataset.version,
            "listed": listed,
            "stage": CacheTokens(encode),
            "unit_items": spec.unit_items,
            "num_threads": resources.encode.num_threads,
        }
        left = [{"fragment": f, "shards": json.dumps(shards_of[f])} for f in lacking]
        if left:
            filled = fill_fragments(CacheFragment, given, left, resources.encode)
            commit_filled(session, filled, COMMIT_FRAGMENTS, progress, report)
        if progress.empty:
            report(
                f"{progress.empty:,} items have no tokens: the adapter makes none of them,"
                " or they cannot be read"
            )
    return progress


def _fragments(
    session: Session, listed: ListingJob, resources: IndexResources
) -> dict[int, list[int]]:
    """The shards of the source by the fragment in which rows of them lie, unchanged ones."""
    read = resources.read
    num_shards = ray.get(tasks.plan.options(**read.task_options).remote(listed, None))
    task = _placed.options(**read.task_options)
    found = tasks.map_shards(task, listed, range(num_shards), read.max_actors, session.check)
    shards_of: dict[int, list[int]] = {}
    for shard, fragments in found:
        for fragment in fragments:
            shards_of.setdefault(fragment, []).append(shard)
    return {fragment: sorted(shards_of[fragment]) for fragment in sorted(shards_of)}


@ray.remote
def _placed(listed: ListingJob, shard: int) -> tuple[int, list[int]]:
    listing.list_shard(listed, shard)
    return shard, unit_reader.fragments_of(listed, shard)


@dataclass(frozen=True)
class CacheTokens(Stage):
    """The adapter's tokens of items, without any other column."""

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
        found = Found()
        for encoded in self._encoder.batches(items):
            table = pa.table({RERANK_TOKENS: self._encoder.rerank_tokens(encoded.batch)})
            found.add(encoded.aspect, encoded.rows, table, encoded.problems)
        aspects, nothing = self._encoder.stage.aspects, self._encoder.nothing
        return Processed(*found.join(items.select(ITEM.names), aspects, nothing))


class CacheFragment:
    """Encodes a fragment's items that have no tokens, and writes the column's data file."""

    def __init__(
        self,
        index: str,
        version: int,
        listed: ListingJob,
        stage: CacheTokens,
        unit_items: int,
        num_threads: int,
    ):
        import torch

        torch.set_num_threads(num_threads)
        self.index, self.listed = Index(index, version), listed
        self.stage, self.unit_items = stage.load(), unit_items

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[str]]:
        """Fills the fragments of a batch; returns the JSON of a `Filled` for each."""
        asked = zip(batch["fragment"], batch["shards"], strict=True)
        filled = [self.fill(int(number), json.loads(shards)) for number, shards in asked]
        return {"filled": [one.to_json() for one in filled]}

    def fill(self, number: int, shards: list[int]) -> Filled:
        """Fills the rows of one fragment that have no tokens."""
        start = time.perf_counter()
        fragment = get_fragment(self.index.dataset, number)
        with self.index.reading():
            table = fragment.to_table(columns=["item_id"], filter=WITHOUT_TOKENS, with_row_id=True)
        row_of = dict(zip(table["item_id"].to_pylist(), table["_rowid"].to_pylist(), strict=True))
        parts, num_tried = [], 0
        for shard in shards:
            units = unit_reader.stored_units(self.listed, shard, number, row_of, self.unit_items)
            for unit, num_unread in units:
                num_tried += unit.items.num_rows + num_unread
                done = run_stage(self.stage, unit).items
                if RERANK_TOKENS in done.column_names:
                    has_tokens = done[RERANK_TOKENS].is_valid()
                    parts.append(done.filter(has_tokens).select(["item_id", RERANK_TOKENS]))
        num_done = sum(part.num_rows for part in parts)
        encoded = time.perf_counter()
        written: Any = None
        modified: list[int] = []
        if num_done:
            filled = pa.concat_tables(parts)
            rows = pa.array([row_of[i] for i in filled["item_id"].to_pylist()], pa.uint64())
            field = self.index.schema.field(RERANK_TOKENS)
            columns = pa.schema([pa.field("_rowid", pa.uint64()), field])
            filled = pa.table([rows, filled[RERANK_TOKENS]], names=columns.names).cast(columns)
            metadata, modified = fragment.update_columns(filled)
            written = metadata.to_json()
        seconds = {"encode": encoded - start, "write": time.perf_counter() - encoded}
        return Filled(written, modified, num_done, num_tried - num_done, seconds)
