"""Index job: an executor streams units through encoders, and the driver commits fragments.

However a job ends, its commits persist and the next run resumes from them: the index is its own
checkpoint.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.config import JobError, SpecError
from pipeline.data.combined import Combined
from pipeline.index import JOBS, tasks
from pipeline.index.checks import check, check_reasons, check_resources
from pipeline.index.compaction import FragmentMerger
from pipeline.index.counts import Counts
from pipeline.index.executor import Executor
from pipeline.index.fitting import LearnedState, fitted_fields, needs_fit, trained_state
from pipeline.index.fragments import Pending, reason_counts
from pipeline.index.in_process import current
from pipeline.index.languages import index_language_warnings
from pipeline.index.listing import (
    ListingJob,
    ShardTally,
    mark_duplicates,
    stale_rows,
    unlisted_rejects,
)
from pipeline.index.plan import ColumnPlan, plan_columns
from pipeline.index.reader import IndexReader, open_folder, quote
from pipeline.index.session import Session
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import FINISHED
from pipeline.index.stream import encode_stage, index_stream
from pipeline.index.units import UnitRange
from pipeline.index.writer import IndexWriter
from pipeline.registry import ENCODERS, SOURCES
from pipeline.runtime import logs, tracing
from pipeline.runtime.progress import Totals, ray_is_connected
from pipeline.schema import REJECT

log = logging.getLogger("maxray.index")

#: Statuses of listed items that the job processes.
TO_DO = ("new", "changed", "duplicate", "foreign")
#: Maximum number of items that a report names.
MAX_EXAMPLES = 3
#: Maximum share of the time that commits take.
MAX_COMMIT_SHARE = 0.05


@dataclass(frozen=True)
class Context:
    """Shared state of the phases of a run."""

    spec: IndexSpec
    resources: IndexResources
    session: Session
    progress: Counts
    report: Callable[[str], None]

    @property
    def writer(self) -> IndexWriter:
        """Writer of the session."""
        return self.session.writer

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function with the resources of `read` and returns its result."""
        return self.session.run(self.resources.read, function, *arguments)

    def list_shards(self, job: ListingJob, limit: int | None = None) -> Iterator[ShardTally]:
        """Plans and lists a source with the resources of `read` and yields the tallies."""
        return tasks.list_shards(self.session, self.resources.read, job, limit)


@dataclass(frozen=True)
class Listing:
    """Result of listing the source.

    Attributes:
        ranges: Units with items to process, divided into tasks.
        num_unreadable: Number of unreadable parts of the source.
    """

    job: ListingJob
    num_shards: int
    ranges: tuple[UnitRange, ...]
    num_unreadable: int


def run(
    spec: IndexSpec,
    resources: IndexResources,
    *,
    job: str,
    limit: int | None = None,
    remove_missing: bool | None = False,
    retry_rejects: tuple[str, ...] = (),
    report: Callable[[str], None] = log.info,
    lease_seconds: float | None = None,
    executor: Executor | None = None,
) -> Counts:
    """Runs the job until all items have been processed.

    Args:
        limit: Maximum number of items to list, or None for all.
        remove_missing: Whether to remove rows that the source no longer lists, see `find_missing`.
        retry_rejects: Reasons whose rejects are retried.
        executor: Executor of the job. The default is that of this process.

    Raises:
        SpecError: An input is invalid. Raised before anything is written.
        LeaseHeld: Another job is writing to the index.
        Stopped: SIGTERM was received. Finished work is committed and the lease is released.
    """
    spec = check(spec)
    check_resources(spec, resources)
    executor = executor or current()
    executor.check(resources)
    check_reasons(spec, retry_rejects)
    progress = Counts()
    start = time.perf_counter()
    record = (spec.index, spec, "index", job, progress.summary)
    with Session(*record, lease_seconds, executor) as session:
        progress.phases = session.monitor.phases
        progress.phases["lease"] = time.perf_counter() - start
        context = Context(spec, resources, session, progress, report)
        # The encoder is loaded while the source is listed.
        describe = tasks.describe_encoder, spec.encoder, spec.see
        encoder_info = executor.submit(resources.encode, *describe)
        listing = list_source(context, limit, retry_rejects)
        with context.session.monitor.phase("load encoder", total=progress.to_do):
            columns = plan_columns(spec, session.wait(encoder_info), session.writer)
        learned = fit_columns(context, listing, columns)
        stream(context, listing, columns, learned)
        with session.monitor.phase("finish"):
            finish(context)
        if limit is None:
            find_missing(context, listing, remove_missing)
    return progress


def list_source(context: Context, limit: int | None, retry_rejects: tuple[str, ...]) -> Listing:
    """Lists the source, records entries that cannot be listed and finds the items to process."""
    progress, writer = context.progress, context.writer
    job = context.spec.listing_job(context.session.folder, retry_rejects)
    with context.session.monitor.phase("index ids"):
        writer.index_ids()
    tallies: list[ShardTally] = []
    num_listed = 0
    with context.session.monitor.phase("list", "shards"):
        for tally in context.list_shards(job, limit):
            tallies.append(tally)
            num_listed += sum(tally.counts.values())
            context.session.monitor.update(done=len(tallies), listed=num_listed)
            if tally.solved:
                writer.set_rejects(REJECT.empty_table(), tally.solved)
    tallies.sort(key=lambda tally: tally.shard)
    num_shards = len(tallies)
    counts = {tally.shard: tally.counts for tally in tallies}
    with context.session.monitor.phase("mark duplicates"):
        counts.update(context.run(mark_duplicates, job, num_shards))
    # Recorded after listing: otherwise later shards would count these rejects as already known.
    with context.session.monitor.phase("record rejects"):
        shards = [tally.shard for tally in tallies if tally.num_unlisted]
        calls = [(job, shard) for shard in shards]
        read, check = context.resources.read, context.session.check
        found = context.session.executor.map(read, unlisted_rejects, calls, check)
        for rejects, num_known in found:
            progress.rejected_before += num_known
            progress.rejected += rejects.num_rows
            progress.listed += num_known + rejects.num_rows
            writer.set_rejects(rejects)
            if rejects.num_rows:
                reasons = reason_counts(rejects)
                logs.event(log, "items_rejected", logging.WARNING, unit=None, reasons=reasons)
    total = sum((Counter(c) for c in counts.values()), Counter())
    progress.listed += sum(total.values())
    progress.unchanged = total["done"]
    progress.rejected_before += total["rejected"]
    progress.to_do = sum(total[status] for status in TO_DO) + progress.rejected
    context.report(
        f"listed {progress.listed:,} items in {num_shards} shards"
        f" ({progress.phases['list']:.1f} s): {total['new']:,} new,"
        f" {total['changed']:,} changed, {total['done']:,} already indexed,"
        f" {progress.rejected_before:,} already rejected"
    )
    counts_by_status = {"listed": progress.listed, "to_do": progress.to_do}
    counts_by_status |= {"unchanged": progress.unchanged, "rejected": progress.rejected_before}
    logs.event(log, "listed", shards=num_shards, retried_reasons=retry_rejects, **counts_by_status)
    to_do = [t for t in tallies if any(counts[t.shard][status] for status in TO_DO)]
    # Finished items that turned out to be duplicates have to be processed, but have no range.
    ranges = tuple(r for t in to_do for r in t.ranges or [UnitRange(t.shard)])
    num_unreadable = sum(tally.num_unreadable for tally in tallies)
    return Listing(job, num_shards, ranges, num_unreadable)


def fit_columns(
    context: Context, listing: Listing, columns: ColumnPlan
) -> Mapping[str, LearnedState]:
    """Fits representations and adds missing columns. Returns the learned state by id."""
    spec = context.spec
    fitted = [r for r in columns.added if needs_fit(r)]
    job, num_shards = _calibration(context, listing) if fitted else (listing.job, 0)
    learned, fields = dict(columns.learned), []
    for r in columns.added:
        if r not in fitted:
            learned[r.id] = trained_state(r, columns.encoder_info)
        else:
            stage = encode_stage(spec, columns.encoder_info, [r])
            with context.session.monitor.phase(f"fit {r.id}", total=context.progress.to_do):
                fit = tasks.fit_representation, job, num_shards, spec.fit, stage, r
                learned[r.id] = context.session.run(context.resources.encode, *fit)
        fields += fitted_fields(spec.index, r, columns.encoder_info, learned[r.id])
    context.writer.add_columns([*columns.encoder_fields, *fields, *columns.rerank_fields])
    return learned


def _calibration(context: Context, listing: Listing) -> tuple[ListingJob, int]:
    spec = context.spec.calibration()
    if spec is None:
        return listing.job, listing.num_shards
    job = spec.listing_job(f"{context.session.folder}/fit")
    with context.session.monitor.phase("list the calibration source"):
        num_shards = sum(1 for _ in context.list_shards(job))
        context.run(mark_duplicates, job, num_shards)
    return job, num_shards


def stream(
    context: Context, listing: Listing, columns: ColumnPlan, learned: Mapping[str, LearnedState]
) -> None:
    """Encodes, compresses, writes and commits all items that have to be processed."""
    if not listing.ranges:
        return
    spec, progress, session = context.spec, context.progress, context.session
    index = index_stream(
        spec,
        context.resources,
        listing.job,
        listing.ranges,
        columns.encoder_info,
        learned,
        columns.encoder_columns,
        session.job,
    )
    # If the job dies, committed fragments persist and the next run recomputes the others.
    pending = Pending()
    before, interval = progress.done, spec.commit_seconds
    merger = FragmentMerger(session, context.resources.write)

    def steps() -> dict[str, Totals] | None:
        totals = session.executor.totals(session.job)
        finished = totals.pop(FINISHED, None)
        if finished is None:
            return None
        # Exact counts arrive with each fragment, those of the board with each unit.
        counted = max(before + finished.items, progress.done + pending.num_done)
        session.monitor.update(done=min(counted, progress.to_do))
        return {step: counts for step, counts in totals.items() if counts.items}

    progress.stream_started = time.time()
    context.report(f"{progress.to_do:,} items to process; loading the encoder")
    start = committed = time.perf_counter()
    stream = closing(session.executor.written(index, context.resources))
    with session.monitor.phase("index", total=progress.to_do, steps=steps), stream as parts:
        try:
            for written in parts:
                if written is not None:
                    progress.first_written = progress.first_written or time.time()
                    pending.add(written)
                now = time.perf_counter()
                if pending.units and (now - committed > interval or _is_full(spec, pending)):
                    _commit(context, listing, pending)
                    merger.step()
                    pending, committed = Pending(), time.perf_counter()
                    # Commits take longer the more fragments the index has.
                    interval = max(spec.commit_seconds, (committed - now) / MAX_COMMIT_SHARE)
                session.check()
        finally:
            if pending.units and session.may_commit:
                _commit(context, listing, pending)
        merger.finish()
    context.report(progress.line(time.perf_counter() - start))


def _is_full(spec: IndexSpec, pending: Pending) -> bool:
    is_full = spec.commit_items is not None and pending.num_items >= spec.commit_items
    return is_full or pending.num_bytes >= spec.commit_bytes


def _commit(context: Context, listing: Listing, pending: Pending) -> None:
    writer, start = context.writer, time.perf_counter()
    job, units = context.session.job, [unit.name for unit in pending.units]
    with tracing.span("commit", job=job, units=units):
        if pending.fragments:
            writer.commit(pending.fragments, pending.replaced)
        else:
            writer.renew()  # writing only rejects requires the lease as well
        writer.set_rejects(pending.rejects_with(listing.job.spec_digest), pending.item_ids)
    seconds = time.perf_counter() - start
    if ray_is_connected():
        from pipeline.index.metrics import commit_seconds

        commit_seconds().observe(seconds)
    version = writer.dataset.version
    for unit in pending.units:
        tracing.record_steps("unit", unit.steps, job=job, unit=unit.name, items=unit.items)
        logs.event(log, "unit_committed", unit=unit.name, items=unit.items, version=version)
        if unit.rejects:
            logs.event(log, "items_rejected", logging.WARNING, unit=unit.name, reasons=unit.rejects)
    logs.event(
        log, "committed", version=version, items=pending.num_items, seconds=round(seconds, 3)
    )
    progress = context.progress
    progress.add_commit(pending)
    context.session.monitor.update(
        committed=progress.new + progress.replaced, rejected=progress.rejected
    )
    context.session.record("running")


def finish(context: Context) -> None:
    """Checks that all listed items are accounted for. Reports the counts and the warnings."""
    spec, progress, report = context.spec, context.progress, context.report
    context.writer.index_ids()
    rejected = progress.rejected_before + progress.rejected
    gone = f" + deleted since {progress.gone:,}" if progress.gone else ""
    report(
        f"listed {progress.listed:,} = indexed {progress.indexed:,} ({progress.new:,} new,"
        f" {progress.replaced:,} replaced, {progress.unchanged:,} unchanged)"
        f" + rejected {rejected:,}{gone}; {progress.commits} commits"
    )
    if progress.listed != progress.indexed + rejected + progress.gone:
        accounted = f"indexed {progress.indexed:,} + rejected {rejected:,}{gone}"
        raise JobError(
            f"accounting check failed: listed {progress.listed:,} != {accounted}; rerun the job"
        )
    if rejected:
        collections = spec.build_source().collections
        table = IndexReader(spec.index).rejects().to_pylist()
        by_reason: dict[str, list[str]] = {}
        for row in table:
            if row["source"] in collections:
                by_reason.setdefault(row["reason"], []).append(row["item_id"])
        for reason, ids in sorted(by_reason.items(), key=lambda entry: (-len(entry[1]), entry[0])):
            report(f"rejected {len(ids):,}: {reason} ({examples(sorted(ids))})")
        command = f"maxray status {shlex.quote(spec.index)} --rejects"
        report(f"all rejects with their details: {command}")
    truncated = context.run(tasks.truncated_files, spec) if tasks.has_media(spec) else []
    progress.truncated = len(truncated)
    if truncated:
        names = ", ".join(truncated[:5]) + (", ..." if len(truncated) > 5 else "")
        report(f"truncated files: {len(truncated):,} ({names}), indexed up to the truncation")
    if ENCODERS.load(spec.encoder.name).has_warnings(spec.encoder):
        report("checking recognition files for ids without an item")
        for sentence in context.run(tasks.remarks, spec):
            report(sentence)
    if progress.to_do:
        index = IndexReader(spec.index)
        for warning in index_language_warnings(index, index.representations()):
            report(f"warning: {warning}")


def find_missing(context: Context, listing: Listing, remove: bool | None) -> None:
    """Reports or removes rows that the source no longer lists, if all of it could be read.

    Args:
        remove: Whether to remove them. None removes them, and accepts that the source is unreadable
            in part.
    """
    if listing.num_unreadable:
        if not remove:
            return
        raise JobError(
            f"nothing was removed: {listing.num_unreadable} parts of the source cannot be read"
            " (see the rejects); the rest of the job is complete"
        )
    source, progress = listing.job.build_source(), context.progress
    for error in source.empty() if isinstance(source, Combined) else ():
        context.report(f"source{error.field}: {error.value} {error.problem} ({error.rule})")
    collections = source.collections
    names = [*collections, *_former_collections(context, collections)]
    stale = context.run(stale_rows, listing.job, listing.num_shards, names)
    progress.missing = sum(map(len, stale.values()))
    if remove or (remove is None and stale):
        context.writer.remove(stale)
        progress.removed = progress.missing
        context.report(f"removed {progress.removed:,} items that the source no longer lists")
    elif stale:
        ids = sorted(item_id for ids in stale.values() for item_id in ids)
        context.report(
            f"{progress.missing:,} indexed items are no longer listed ({examples(ids)});"
            " rerun with --remove-missing to remove them"
        )


def _former_collections(context: Context, collections: Sequence[str]) -> list[str]:
    """Returns collections once listed together with `collections`, and not without them since."""
    condition = f"source NOT IN ({', '.join(map(quote, collections))})"
    if not context.writer.dataset.count_rows(condition):
        return []
    filesystem, path = open_folder(context.spec.index, JOBS)
    former, others = dict[str, None](), set[str]()
    for folder in sorted(filesystem.ls(path, detail=False), reverse=True):
        try:
            with filesystem.open(f"{folder}/spec.yaml", "r", encoding="utf-8") as stream:
                fields = yaml.safe_load(stream)["source"]
            listed = SOURCES.build(SOURCES.resolve(fields)).collections
        except (OSError, SpecError, KeyError, TypeError):  # not a job that lists a source
            continue
        if set(listed) & set(collections):
            former |= dict.fromkeys(name for name in listed if name not in others)
        else:
            others |= set(listed)
    return [name for name in former if name not in collections]


def examples(names: Sequence[str]) -> str:
    """Returns the first names of a list, separated by commas."""
    return ", ".join(names[:MAX_EXAMPLES]) + ", ..." * (len(names) > MAX_EXAMPLES)
