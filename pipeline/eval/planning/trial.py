"""Trial of the stages of an index job on a random sample of its items."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from pipeline.config import JobError, dump_yaml
from pipeline.eval.planning.estimate import StageTime
from pipeline.index import tasks, unit_reader
from pipeline.index.checks import check
from pipeline.index.columns import all_representations, representation_fields
from pipeline.index.fitting import needs_fit, trained_state
from pipeline.index.fragments import write_table
from pipeline.index.in_process import current
from pipeline.index.info import EncoderInfo
from pipeline.index.languages import language_warning
from pipeline.index.rerank_tokens import rerank_field
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import Unit, run_stage
from pipeline.index.stages import Columns, Compress, Represent
from pipeline.index.stream import encode_stage, encoder_columns
from pipeline.registry import CODECS
from pipeline.schema import ITEM, Reject
from pipeline.tokens import TokenBatch, flat_from_arrow

#: Maximum number of items that a dry run encodes.
NUM_TRIED = 32


@dataclass(frozen=True)
class Trial:
    """Means of a sample.

    Attributes:
        payload_bytes: Size of a decoded item.
        column_bytes: Size of each token column in memory, per item.
        stored_bytes: Size of the index on disk, per item.
        unfitted: Representations that were omitted because their compressor needs fitting.
        warning: Sentence about texts in languages that the encoder does not support, or None.
    """

    num_items: int
    times: dict[str, StageTime]
    tokens: float
    dim: int
    payload_bytes: float
    column_bytes: dict[str, float]
    stored_bytes: float
    rejects: list[str] = field(default_factory=list)
    unfitted: list[str] = field(default_factory=list)
    warning: str | None = None


@dataclass(frozen=True)
class Listed:
    """Listing of a source, while which the encoder was loaded.

    Attributes:
        sample: Random sample of the items, as (shard, [(position, item), ...]) pairs.
        loading_seconds: Time of starting a process and loading the encoder.
    """

    num_items: int
    rejects: list[Reject]
    seconds: float
    sample: list[unit_reader.Chosen]
    encoder_info: EncoderInfo
    loading_seconds: float


def list_items(spec: IndexSpec, resources: IndexResources, limit: int | None, size: int) -> Listed:
    """Lists the source, draws a sample, and loads the encoder at the same time as the job does.

    Nothing is decoded.
    """
    start, executor = time.perf_counter(), current()
    described = executor.submit(resources.encode, tasks.describe_encoder, spec.encoder, spec.see)
    chosen = executor.submit(resources.read, _choose, spec, limit, size)
    encoder_info = described.result()
    loading_seconds = time.perf_counter() - start
    sample, num_items, rejects, seconds = chosen.result()
    return Listed(num_items, rejects, seconds, sample, encoder_info, loading_seconds)


def _choose(
    spec: IndexSpec, limit: int | None, size: int
) -> tuple[list[unit_reader.Chosen], int, list[Reject], float]:
    start = time.perf_counter()
    chosen = unit_reader.choose(spec.build_source(), limit, size)
    return *chosen, time.perf_counter() - start


def run_trial(
    spec: IndexSpec, resources: IndexResources, listed: Listed, max_seconds: float = 60.0
) -> Trial:
    """Processes a sample like an encoding actor, for about `max_seconds`. Nothing is kept."""
    arguments = spec, listed.sample, listed.encoder_info, dict(resources.placement), max_seconds
    return current().submit(resources.encode, _run_trial, *arguments).result()


class _Clock:
    """Times of the stages, summed over items."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.core_seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        start, cpu_start = time.perf_counter(), time.process_time()
        yield
        elapsed = time.perf_counter() - start
        self.add({stage: elapsed}, time.process_time() - cpu_start)

    def add(self, seconds: dict[str, float], core_seconds: float) -> None:
        """Adds the times of stages, in proportion to which the CPU time is divided.

        A process that waits for a child process, such as a video decoder, has no CPU time of its
        own, so that the elapsed time is the minimum.
        """
        total = sum(seconds.values())
        for stage, elapsed in seconds.items():
            cores = max(elapsed, core_seconds * elapsed / total if total else 0.0)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed
            self.core_seconds[stage] = self.core_seconds.get(stage, 0.0) + cores

    def times(self, num_items: int) -> dict[str, StageTime]:
        return {
            stage: StageTime(elapsed / num_items, self.core_seconds[stage] / num_items)
            for stage, elapsed in self.seconds.items()
        }


class _CountingCompressor(Compress):
    num_tokens = 0

    def columns(self, batch: TokenBatch, item_field: str = "content") -> Columns:
        self.num_tokens += int(batch.mask.sum())
        return super().columns(batch, item_field)


def _run_trial(
    spec: IndexSpec,
    sample: list[unit_reader.Chosen],
    encoder_info: EncoderInfo,
    placement: dict[str, Any],
    max_seconds: float,
) -> Trial:
    stages = _Stages(spec, encoder_info, placement)
    stages.warm_up(sample)
    stages.run(sample, max_seconds)
    return stages.result()


class _Stages:
    """Loaded stages of an index job, and what they measure.

    Compressors that need fitting are omitted. For codecs that need it, sizes are computed from
    their bytes per token.
    """

    def __init__(self, spec: IndexSpec, encoder_info: EncoderInfo, placement: dict[str, Any]):
        self._info = encoder_info
        requested = all_representations(spec)
        codecs = {r.id: codec for r in requested if (codec := CODECS.build(r.codec)).needs_fit}
        float16 = CODECS.resolve("float16")
        stored = [
            r.model_copy(update={"codec": float16}) if r.id in codecs else r for r in requested
        ]
        fitted = [r for r in stored if not needs_fit(r)]
        self._unfitted = [r.id for r in stored if needs_fit(r)]
        self._codecs = {r.id: codecs[r.id] for r in fitted if r.id in codecs}
        shared = encoder_columns(spec, encoder_info)
        encode = encode_stage(spec, encoder_info, fitted, rerank=True, placement=placement)
        learned = {r.id: trained_state(r, encoder_info) for r in fitted}
        names = [column.name for column in shared]
        self._compressor = _CountingCompressor(encoder_info, fitted, learned, names)
        self._stage = Represent(encode, self._compressor).load()
        self._columns = self._stage.adds
        fields = [*ITEM, *shared]
        for representation in fitted:
            fields += representation_fields(representation, encoder_info, None, None)
        if spec.rerank is not None:
            fields.append(rerank_field(spec.rerank, encoder_info))
        self._schema = pa.schema(fields)
        self._source, self._limits = spec.build_source(), spec.unit_limits
        self._clock = _Clock()
        self._tables: list[pa.Table] = []
        self._rejects: list[str] = []
        self._num_read = self._payload_bytes = 0

    def warm_up(self, sample: list[unit_reader.Chosen]) -> None:
        """Processes a few items without measuring them, because first calls are slow."""
        shard, wanted = sample[0]
        for items, _ in unit_reader.decode_units(self._source, [(shard, wanted[:2])], self._limits):
            run_stage(self._stage, Unit("warm-up", items))
        self._compressor.num_tokens = 0

    def run(self, sample: list[unit_reader.Chosen], max_seconds: float) -> None:
        units = unit_reader.decode_units(self._source, sample, self._limits)
        end = time.perf_counter() + max_seconds
        while time.perf_counter() < end:
            with self._clock.measure("read"):
                decoded = next(units, None)
            if decoded is None:
                break
            items, rejects = decoded
            self._num_read += items.num_rows + len(rejects)
            self._payload_bytes += items.nbytes
            start = time.process_time()
            unit = run_stage(self._stage, Unit("trial", items))
            self._clock.add(unit.seconds, time.process_time() - start)
            self._tables.append(unit.items)
            self._rejects += [reject.reason for reject in rejects]
            self._rejects += unit.rejects["reason"].to_pylist()

    def result(self) -> Trial:
        """Writes the processed items to a temporary folder and returns all means."""
        tables = [table for table in self._tables if table.num_rows]
        if not tables:
            counts = Counter(self._rejects)
            reasons = ", ".join(f"{reason} ({number})" for reason, number in counts.items())
            raise JobError(f"all {len(self._rejects)} sampled items are rejected: {reasons}")
        # Units lack the columns of a field that none of their items has.
        table = pa.concat_tables(tables, promote_options="default")
        num_items = table.num_rows
        with tempfile.TemporaryDirectory() as folder:
            lance.write_dataset(self._schema.empty_table(), folder)
            with self._clock.measure("write"):
                write_table(table, folder)
            stored_bytes = sum(file.stat().st_size for file in Path(folder, "data").rglob("*"))
        names = [name for name in self._columns if name in table.column_names]
        column_bytes = {name: table[name].nbytes / num_items for name in names}
        for name, codec in self._codecs.items():
            flat, lengths = flat_from_arrow(table[name])
            fitted_bytes = int(lengths.sum()) * codec.token_bytes(flat.shape[1]) / num_items
            stored_bytes += num_items * (fitted_bytes - column_bytes[name])
            column_bytes[name] = fitted_bytes
        return Trial(
            num_items=num_items,
            times=self._clock.times(num_items),
            tokens=self._compressor.num_tokens / num_items,
            dim=self._info.dim,
            payload_bytes=self._payload_bytes / self._num_read,
            column_bytes=column_bytes,
            stored_bytes=stored_bytes / num_items,
            rejects=self._rejects,
            unfitted=self._unfitted,
            warning=language_warning(table["text"].to_pylist(), self._info, "sampled items"),
        )


def dry_run(
    spec: IndexSpec, resources: IndexResources, limit: int | None, report: Callable[[str], None]
) -> None:
    """Estimates the time and size of an index job from a few items. Nothing is written."""
    spec = check(spec)
    report(dump_yaml(spec).rstrip())
    listed = list_items(spec, resources, limit, NUM_TRIED)
    num_rejects = len(listed.rejects)
    report(f"\nlisted {listed.num_items + num_rejects:,} items, {num_rejects:,} unreadable")
    for reject in listed.rejects[:5]:
        report(f"  rejected {reject.item_id}: {reject.reason} {reject.detail}")
    if not listed.sample:
        return
    trial = run_trial(spec, resources, listed)
    rate = 1 / sum(time.seconds for time in trial.times.values())
    num_actors = resources.encode.max_actors
    report(
        f"encoded {trial.num_items} items: {trial.tokens:.0f} tokens per item,"
        f" {rate:,.1f} items/s per actor;"
        f" about {listed.num_items / rate / num_actors:,.0f} s in total with {num_actors} actors"
    )
    for reason, number in Counter(trial.rejects).items():
        report(f"  rejected {number} of them: {reason}")
    for name, num_bytes in trial.column_bytes.items():
        total = f"{num_bytes * listed.num_items / 1e6:12,.1f} MB"
        report(f"  {name:24} {num_bytes:10,.0f} bytes per item {total}")
    if trial.warning:
        report(f"warning: {trial.warning}")
