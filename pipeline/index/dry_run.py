"""Dry run of the index job, which encodes a few items and estimates the time and size."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa
import ray

from pipeline.config import dump_yaml, within
from pipeline.index import unit_reader
from pipeline.index.checks import check
from pipeline.index.columns import all_representations
from pipeline.index.fitting import needs_fit, trained_state
from pipeline.index.info import EncoderInfo
from pipeline.index.rerank_tokens import rerank_field
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stages import Compress, Represent, Representer, TokenCompressor
from pipeline.index.stream import encode_stage, encoder_columns
from pipeline.registry import CODECS, ENCODERS
from pipeline.schema import Reject
from pipeline.stage import Unit, run_stage
from pipeline.tokens import TokenBatch, flat_from_arrow

#: Maximum number of items to encode.
NUM_TRIED = 32


class Trial(NamedTuple):
    """Result of encoding and compressing a few items.

    Attributes:
        tokens: Tokens per item.
        rate: Items per second.
        bytes: Bytes per item, by column.
        rejects: Reason of each rejected item.
    """

    tokens: float
    rate: float
    bytes: dict[str, float]
    rejects: list[str]


class CountingCompressor(TokenCompressor):
    """Compressor that also counts the tokens of its input."""

    num_tokens = 0

    def columns(self, batch: TokenBatch, item_field: str = "content") -> pa.Table:
        """Counts the tokens of a batch and compresses it."""
        self.num_tokens += int(batch.mask.sum())
        return super().columns(batch, item_field)


def dry_run(
    spec: IndexSpec, resources: IndexResources, limit: int | None, report: Callable[[str], None]
) -> None:
    """Estimates the time and size of an index job from a few items. Nothing is written.

    Args:
        spec: Spec of the job.
        resources: Resources profile of the job.
        limit: Maximum number of items to list, or None for all.
        report: Called with each line of the estimate.
    """
    check(spec)
    report(dump_yaml(spec).rstrip())
    sample, num_items, rejects = ray.get(_preview.remote(spec, limit))
    report(f"\nlisted {num_items + len(rejects):,} items, {len(rejects):,} unreadable")
    for reject in rejects[:5]:
        report(f"  rejected {reject.item_id}: {reject.reason} {reject.detail}")
    if not sample.num_rows:
        return
    task = _run_trial.options(**resources.encode.task_options)
    trial = ray.get(task.remote(spec, sample))
    num_actors = resources.encode.max_actors
    report(
        f"encoded {sample.num_rows} items: {trial.tokens:.0f} tokens per item,"
        f" {trial.rate:,.1f} items/s per actor;"
        f" about {num_items / trial.rate / num_actors:,.0f} s in total with {num_actors} actors"
    )
    for reason, number in Counter(trial.rejects).items():
        report(f"  rejected {number} of them: {reason}")
    for name, num_bytes in trial.bytes.items():
        total = f"{num_bytes * num_items / 1e6:12,.1f} MB"
        report(f"  {name:24} {num_bytes:10,.0f} bytes per item {total}")


@ray.remote
def _preview(spec: IndexSpec, limit: int | None) -> tuple[pa.Table, int, list[Reject]]:
    return unit_reader.preview(spec.build_source(), limit, NUM_TRIED)


@ray.remote
def _run_trial(spec: IndexSpec, items: pa.Table) -> Trial:
    """Encodes and compresses a few items without fitting.

    Compressors that need fitting are omitted. For codecs that need it, sizes are computed from
    their bytes per token.
    """
    with within("encoder"):
        encoder_info = EncoderInfo.from_encoder(ENCODERS.build(spec.encoder), spec.encoder)
    if spec.rerank is not None:
        rerank_field(spec.rerank, encoder_info)  # raises if the EDJE has another encoder
    float16 = CODECS.resolve("float16")
    requested = all_representations(spec)
    codecs = {r.id: codec for r in requested if (codec := CODECS.build(r.codec)).needs_fit}
    unfitted = [r.model_copy(update={"codec": float16}) if r.id in codecs else r for r in requested]
    unfitted = [r for r in unfitted if not needs_fit(r)]
    encode = encode_stage(spec, encoder_info, unfitted, rerank=True)
    learned = {r.id: trained_state(r, encoder_info) for r in unfitted}
    compress = Compress(
        encoder_info,
        unfitted,
        learned,
        [column.name for column in encoder_columns(spec, encoder_info)],
    )
    compressor = CountingCompressor(compress)
    stage = Representer(encode.load(), compressor)
    start = time.perf_counter()
    unit = run_stage(stage, Unit("trial", items))
    elapsed = time.perf_counter() - start
    stored = Represent(encode, compress).adds
    columns = {name: unit.items[name] for name in stored if name in unit.items.column_names}
    num_bytes = {name: column.nbytes / items.num_rows for name, column in columns.items()}
    for name in codecs.keys() & columns.keys():
        flat, lengths = flat_from_arrow(columns[name])
        token_bytes = codecs[name].token_bytes(flat.shape[1])
        num_bytes[name] = int(lengths.sum()) * token_bytes / items.num_rows
    return Trial(
        compressor.num_tokens / items.num_rows,
        items.num_rows / elapsed,
        num_bytes,
        unit.rejects["reason"].to_pylist(),
    )
