"""The index job: Ray Data streams units through encoder actors into fragments; the driver commits.

Phases: take the lease - plan shards - list them - (fit) - encode, compress, write, commit - remove
what left the source, if asked. Whatever ends the job, what was committed stays, and the next run
goes on from there: the index is its own checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from lance.fragment import FragmentMetadata
from pydantic import Field, PositiveFloat

from pipeline.config import JobError, Spec, SpecError, Uri, digest, dump, dump_yaml, within
from pipeline.decoding import Unreadable
from pipeline.decoding.process import keep_memory
from pipeline.encoders import Attention
from pipeline.index import listing
from pipeline.index.artefacts import Sample
from pipeline.index.columns import (
    RERANK_TOKENS,
    EncoderFacts,
    Representation,
    Sweep,
    aspects_of,
    by_role,
    compressor_remarks,
    encoder_fields,
    every_representation,
    needed_taps,
    other_setting,
    refuse_other_settings,
    taps_of,
)
from pipeline.index.fitting import Learned, fit, fitted_fields, needs_fit, stored_learned
from pipeline.index.listing import ListingJob
from pipeline.index.reader import Index, check_location, part, quote
from pipeline.index.rerank_tokens import edje_of, refuse_other_adapter, rerank_field
from pipeline.index.session import Session, configure_ray_data, rows_of
from pipeline.index.stages import (
    Compress,
    Encode,
    Prepare,
    Represent,
    WriteFragments,
    with_taps,
)
from pipeline.registry import CODECS, COMPRESSORS, ENCODERS, SOURCES, EncoderSpec, SourceSpec
from pipeline.schema import ITEM, REJECT, Reject, metadata_of
from pipeline.sources import Source
from pipeline.stage import Resources, Stage, Unit, chain, from_ipc, packed_table, run_stage
from pipeline.taps import Tap, TapName, single_taps
from pipeline.tokens import TokenBatch, flat_from_arrow

log = logging.getLogger("maxray.index")


Items = Annotated[int, Field(ge=1, le=1_000_000)]


class FitSample(Spec):
    """The items on which compressors and codecs that need it are fitted.

    Attributes:
        num_items: how many are drawn.
        seed: of the draw.
        source: a separate source for calibration; null: the sample is drawn from the items that
            are indexed, which an evaluation of the index then reports.
    """

    num_items: Items = 256
    seed: int = Field(0, ge=0, lt=2**32)
    source: SourceSpec | None = None


class IndexSpec(Spec):
    """What `jobs.index` computes."""

    index: Uri
    source: SourceSpec
    encoder: EncoderSpec = Field(default="minilm")
    representations: list[Representation] = Field(default_factory=list)
    sweep: Sweep = Field(default_factory=dict)  # field of a representation -> values
    keep_positions: bool = True  # where each token stood: needed for marked words and maps
    keep_taps: list[TapName] = Field(default_factory=list)  # attention to store, for recompress
    rerank: Uri | None = None  # the folder of an EDJE: what its adapter makes is stored too
    unit_items: Items = 64  # items that are encoded, written and committed together
    fragment_items: Items = 512  # items of one written fragment, at most
    commit_items: Items = 1024  # the driver commits after so many items ...
    commit_seconds: PositiveFloat = 30.0  # ... or so many seconds, whichever comes first
    fit: FitSample = FitSample()


class IndexResources(Spec):
    """How much hardware each step of the index job takes: a resources profile."""

    read: Resources = Resources(num_cpus=0.25, max_actors=2)
    prepare: Resources | None = None  # recognising, picture processing; None: in the encoder's
    encode: Resources = Resources(num_cpus=1.0, num_threads=2)
    compress: Resources | None = None  # None: in the encoder's actor
    write: Resources = Resources(num_cpus=0.25)
    # "auto" spreads a model over the GPUs of its actor, for one that is larger than a GPU.
    device_map: Literal["auto"] | None = None
    # Of a local cluster; Ray takes no less than 75 MiB.
    object_store_bytes: int | None = Field(default=None, ge=75 * 2**20)

    @property
    def placement(self) -> dict[str, Any]:
        """What an encoder is told of where its weights go."""
        return {"device_map": self.device_map} if self.device_map else {}


@dataclass
class Progress:
    """Counts and rates of a running job; `seconds` are summed over actors, by stage."""

    listed: int = 0
    unchanged: int = 0
    rejected_before: int = 0
    to_do: int = 0
    new: int = 0
    replaced: int = 0
    rejected: int = 0
    gone: int = 0  # listed, and not there any more when they were to be read
    removed: int = 0
    truncated: int = 0  # indexed files that end before their header says they do
    commits: int = 0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    stream_started: float | None = None
    first_written: float | None = None  # when the driver heard of the first written fragment
    first_commit: float | None = None
    last_commit: float | None = None

    @property
    def indexed(self) -> int:
        """Listed items that have a row of their present revision."""
        return self.unchanged + self.new + self.replaced

    @property
    def done(self) -> int:
        """Items this run has worked off."""
        return self.new + self.replaced + self.rejected + self.gone

    def rates(self) -> dict[str, float]:
        """Items per second of work in each stage (an actor's rate, not the pool's)."""
        done = self.new + self.replaced
        return {name: done / spent for name, spent in self.seconds.items() if spent > 0}

    def summary(self) -> dict[str, Any]:
        """Everything, for the job's record."""
        return {**vars(self), "indexed": self.indexed, "rates": self.rates()}

    def line(self, elapsed: float) -> str:
        """The progress line."""
        rate = (self.new + self.replaced) / elapsed
        left = f"{(self.to_do - self.done) / rate:,.0f} s left" if rate else "nothing written yet"
        share = 100 * self.done / self.to_do if self.to_do else 100.0
        rates = "  ".join(f"{name} {r:,.0f}/s" for name, r in self.rates().items())
        return (
            f"{self.done:,}/{self.to_do:,} items ({share:.0f}%)  {rate:,.1f}/s  [{rates}]  "
            f"rejects {self.rejected:,}  commits {self.commits}  {left}"
        )


def run(
    spec: IndexSpec,
    resources: IndexResources,
    *,
    job: str,
    limit: int | None = None,
    remove_missing: bool = False,
    retry_rejects: tuple[str, ...] = (),
    report: Callable[[str], None] = log.info,
    lease_seconds: float = 60.0,
) -> Progress:
    """Runs the job to its end in a Ray cluster that is connected already.

    Raises:
        SpecError: something the user gave is not legal; said before anything is written.
        LeaseHeld: another job writes to the index.
        Stopped: SIGTERM came; what was finished is committed and the lease is free.
    """
    check(spec)
    if resources.device_map and not ENCODERS.load(spec.encoder.name).can_be_spread:
        legal = f"none (the encoder {spec.encoder.name} is not spread over GPUs)"
        raise SpecError("device_map", resources.device_map, legal)
    _check_reasons(spec, retry_rejects)
    progress = Progress()
    start = time.perf_counter()
    with Session(spec, "index", job, progress.summary, lease_seconds) as session:
        progress.phases["lease"] = time.perf_counter() - start
        this = Run(session, progress, resources, report)
        this.list_source(limit, retry_rejects)
        this.prepare_columns()
        this.stream()
        this.finish()
        this.report_truncated()
        if ENCODERS.load(spec.encoder.name).has_remarks(spec.encoder):
            report("looking for ids in the recognisers' files that belong to no item")
            for sentence in ray.get(_remarks.remote(spec)):
                report(sentence)
        if remove_missing:
            this.remove_missing()
    return progress


def check(spec: IndexSpec) -> None:
    """Raises `SpecError` for what can be known to fail before any work."""
    every_representation(spec)
    check_location(spec.index)
    with within("source"):
        source_of(spec).check()
    if (own := calibration(spec)) is not None:
        with within("fit.source"):
            source_of(own).check()
    encoder = ENCODERS.load(spec.encoder.name)
    with within("encoder"):
        encoder.check(spec.encoder)
    if spec.rerank is not None:
        if "content" not in aspects_of(every_representation(spec)):
            legal = "null, or a representation `of: content`, which it reads"
            raise SpecError("rerank", spec.rerank, legal)
        edje_of(spec.rerank)
    dims = getattr(spec.encoder, "dim", None), getattr(spec.source, "dim", None)
    if "vectors" in encoder.needs and dims[1] and dims[0] != dims[1]:
        raise SpecError("encoder.dim", dims[0], f"{dims[1]}, as source.dim")
    _check_taps(spec, encoder.attention(spec.encoder))
    for each in filter(None, (spec.source, spec.fit.source)):
        for source in SOURCES.load(each.name).parts(each):
            _check_fit(spec, source.name)


def _check_taps(spec: IndexSpec, attention: Attention | None) -> None:
    """Raises `SpecError` if the encoder cannot give an attention statistic that is asked for."""
    wanted = {"keep_taps": [Tap.parse(name) for name in spec.keep_taps]}
    needed = needed_taps(every_representation(spec))
    wanted |= {f"representations.{name}": taps for name, taps in needed.items()}
    for where, taps in wanted.items():
        for tap in taps:
            if attention is None or tap.statistic not in attention.statistics:
                there = ", ".join(attention.statistics) if attention else "no attention"
                legal = f"methods that need no more than what the encoder gives: {there}"
                problem = f"is not given by the encoder {spec.encoder.name}"
                raise SpecError(where, tap.name, legal, problem)
            with within(where):
                tap.numbers(attention.num_layers)


def _check_fit(spec: IndexSpec, source: str) -> None:
    """Raises `SpecError` if a source gives nothing of what is to be encoded."""
    gives = SOURCES.load(source).gives
    aspects = aspects_of(every_representation(spec))
    encoder = ENCODERS.load(spec.encoder.name)
    reads = encoder.wants(spec.encoder)
    if "caption" in gives and "caption" in aspects:
        return
    if "content" not in aspects:
        legal = "content, for sources without captions"
        raise SpecError("representations.of", "caption", legal, f"is nothing that {source} gives")
    missing = set(encoder.needs_of(spec.encoder)) - set(gives)
    if missing or not set(reads) & set(gives):
        legal = f"an encoder of {' or '.join(gives)}, which the source {source} gives"
        problem = f"reads {', '.join(sorted(missing or reads))}"
        raise SpecError("encoder", spec.encoder.name, legal, problem)


def _check_reasons(spec: IndexSpec, reasons: Sequence[str]) -> None:
    """Raises `SpecError` for a reason for which nothing is rejected."""
    if reasons:
        there = set(Index(spec.index).rejects()["reason"].to_pylist())
        for reason in reasons:
            if reason not in there:
                legal = ", ".join(sorted(there)) or "none: nothing is rejected"
                raise SpecError("--retry-rejects", reason, legal, "is no reason in the index")


def calibration(spec: IndexSpec) -> IndexSpec | None:
    """Returns the spec with its separate calibration source as source; None if it has none."""
    return spec.fit.source and spec.model_copy(update={"source": spec.fit.source})


def source_of(spec: IndexSpec) -> Source:
    """The spec's source, which reads what its encoder wants."""
    return SOURCES.build(spec.source, wants_of(spec))


def wants_of(spec: IndexSpec) -> tuple[str, ...]:
    """What is read of the items, see `schema.PAYLOAD`."""
    aspects = aspects_of(every_representation(spec))
    reads = ENCODERS.load(spec.encoder.name).wants(spec.encoder) if "content" in aspects else ()
    return (*reads, *(aspect for aspect in aspects if aspect != "content"))


def dry_run(
    spec: IndexSpec, resources: IndexResources, limit: int | None, report: Callable[[str], None]
) -> None:
    """Resolves the spec, lists the source, encodes a few items and estimates; writes nothing."""
    check(spec)
    report(dump_yaml(spec).rstrip())
    sample, num_items, rejects = ray.get(_preview.remote(spec, limit))
    report(f"\nlisted {num_items + len(rejects):,} items, of which {len(rejects):,} cannot be read")
    for reject in rejects[:5]:
        report(f"  rejected {reject.item_id}: {reject.reason} {reject.detail}")
    if not sample.num_rows:
        return
    trial = ray.get(_trial.options(**resources.encode.of_a_task).remote(spec, sample))
    report(
        f"tried {sample.num_rows} items: {trial['tokens']:.0f} tokens an item,"
        f" {trial['rate']:,.1f} items/s an actor;"
        f" about {num_items / trial['rate'] / resources.encode.max_actors:,.0f} s in all"
        f" with {resources.encode.max_actors} actors"
    )
    for reason, number in Counter(trial["rejects"]).items():
        report(f"  rejected {number} of them: {reason}")
    for name, num_bytes in trial["bytes"].items():
        report(
            f"  {name:24} {num_bytes:10,.0f} bytes an item {num_bytes * num_items / 1e6:12,.1f} MB"
        )


def listing_job(spec: IndexSpec, folder: str, retry_rejects: tuple[str, ...] = ()) -> ListingJob:
    """What the tasks that list the source of a spec share.

    Args:
        folder: of the job, under the index.
    """
    deciding = digest({"source": dump(spec.source), "encoder": dump(spec.encoder)})
    where = part(spec.index), folder
    return ListingJob(*where, spec.source, deciding, retry_rejects, wants_of(spec))


class Run:
    """One run of the index job, inside its session."""

    def __init__(
        self,
        session: Session,
        progress: Progress,
        resources: IndexResources,
        report: Callable[[str], None],
    ):
        self.session, self.progress, self.resources = session, progress, resources
        self.spec: IndexSpec = session.spec
        self.writer, self.report = session.writer, report

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.progress.phases[name] = time.perf_counter() - start

    # -- listing -----------------------------------------------------------------------------

    def list_source(self, limit: int | None, retry_rejects: tuple[str, ...]) -> None:
        """Lists the source and finds what is left to do; meanwhile learns the encoder's facts."""
        spec = self.spec
        self._facts = facts_of.options(**self.resources.encode.of_a_task).remote(spec.encoder)
        self.listing = listing_job(spec, self.session.folder, retry_rejects)
        light = {"num_cpus": self.resources.read.num_cpus}
        with self._phase("index ids"):
            self.writer.index_ids()
        with self._phase("plan"):
            self.num_shards = ray.get(plan.options(**light).remote(self.listing, limit))
        counts: dict[int, dict[str, int]] = {}
        unlisted: dict[int, int] = {}
        self.num_unreadable = 0
        with self._phase("list"):
            at_once = self.resources.read.max_actors
            asked = (_list.options(**light), self.listing, range(self.num_shards), at_once)
            for tally in by_shard(*asked, self.session.check):
                counts[tally.shard] = tally.counts
                unlisted[tally.shard] = tally.num_unlisted
                self.num_unreadable += tally.num_unreadable
                if tally.solved:
                    self.writer.set_rejects(REJECT.empty_table(), tally.solved)
        with self._phase("mark duplicates"):
            counts.update(ray.get(_mark.options(**light).remote(self.listing, self.num_shards)))
        # Only now: a shard that is listed later must not take the rejects of this run for known.
        with self._phase("record rejects"):
            shards = [shard for shard in sorted(unlisted) if unlisted[shard]]
            asked = (_unlisted.options(**light), self.listing, shards, at_once)
            for rejects, num_known in by_shard(*asked, self.session.check):
                self.progress.rejected_before += num_known
                self.progress.rejected += rejects.num_rows
                self.progress.listed += num_known + rejects.num_rows
                self.writer.set_rejects(rejects)
        total = sum((Counter(c) for c in counts.values()), Counter())
        self.progress.listed += sum(total.values())
        self.progress.unchanged = total["done"]
        self.progress.rejected_before += total["rejected"]
        left = ("new", "changed", "duplicate", "foreign")
        self.progress.to_do = sum(total[status] for status in left) + self.progress.rejected
        self.shards_to_do = [s for s in sorted(counts) if any(counts[s][status] for status in left)]
        self.report(
            f"listed {self.progress.listed:,} items in {self.num_shards} shards"
            f" ({self.progress.phases['list']:.1f} s): {total['new']:,} new,"
            f" {total['changed']:,} changed, {total['done']:,} indexed before,"
            f" {self.progress.rejected_before:,} rejected before"
        )

    # -- columns -----------------------------------------------------------------------------

    def prepare_columns(self) -> None:
        """Adds the representations' columns to a new index, or checks them against those there.

        Raises:
            SpecError: a column was made by another encoder or with other settings, or a new
                representation is asked of an index that has rows already.
        """
        spec = self.spec
        with self._phase("load encoder"):
            self.facts: EncoderFacts = ray.get(self._facts)
        wanted = every_representation(spec)
        rerank = [rerank_field(spec.rerank, self.facts)] if spec.rerank else []
        empty = self.writer.dataset.count_rows() == 0
        if empty and not self._columns_are(wanted, rerank):
            self.writer.drop_columns()  # of a run with another spec that committed nothing
        schema = self.writer.dataset.schema
        refuse_other_encoders(schema, self.facts)
        added = [r for r in wanted if r.id not in schema.names]
        if added and not empty:
            raise SpecError(
                "representations",
                added[0].id,
                f"{', '.join(by_role(schema, 'search'))}; add it with"
                f" `python -m jobs.recompress {spec.index}`, then index on",
                "is not in this index, which has rows already",
            )
        if spec.rerank and RERANK_TOKENS in schema.names:
            refuse_other_adapter(spec.rerank, schema.field(RERANK_TOKENS))
            rerank = []
        elif rerank and not empty:
            legal = "null; add it with `python -m jobs.backfill` and this very spec, then index on"
            problem = f"would add {RERANK_TOKENS} to this index, which has rows already"
            raise SpecError("rerank", spec.rerank, legal, problem)
        self.learned: dict[str, Learned] = {}
        for r in wanted:
            there = metadata_of(schema.field(r.id)) if r.id in schema.names else None
            if there:
                refuse_other_settings(r, self.facts, there)
                self.learned[r.id] = stored_learned(spec.index, there)
        fields = []
        for r in added:
            self.learned[r.id] = self._fit(r)
            fields += fitted_fields(spec.index, r, self.facts, self.learned[r.id])
        own = own_fields(self.facts, spec)
        for column in own:
            tap = metadata_of(column).get("tap")
            if tap and not empty and column.name not in schema.names:
                legal = "the attention that the index keeps, or a new index"
                raise SpecError("keep_taps", tap, legal, "is not in this index, which has rows")
        self.encoder_columns = [f.name for f in own if empty or f.name in schema.names]
        fields += rerank
        self.writer.add_columns([f for f in own if empty and f.name not in schema.names] + fields)

    def _columns_are(self, wanted: list[Representation], rerank: list[pa.Field]) -> bool:
        schema = self.writer.dataset.schema
        there = by_role(schema, "search")
        cached = [metadata_of(column) for column in rerank]
        if list(by_role(schema, "rerank").values()) != cached:
            return False
        return set(there) == {r.id for r in wanted} and not any(
            other_setting(r, self.facts, there[r.id]) for r in wanted
        )

    def _fit(self, representation: Representation) -> Learned:
        if not needs_fit(representation):
            return Learned()
        listed, num_shards = self._sampled
        with self._phase(f"fit {representation.id}"):
            return ray.get(
                _fit.options(**self.resources.encode.of_a_task).remote(
                    listed,
                    num_shards,
                    self.spec.fit,
                    encode_stage(self.spec, self.facts, [representation]),
                    representation,
                )
            )

    @functools.cached_property
    def _sampled(self) -> tuple[ListingJob, int]:
        """The listing that items are drawn from to fit on, and the number of its shards."""
        own = calibration(self.spec)
        if own is None:
            return self.listing, self.num_shards
        listed = listing_job(own, f"{self.session.folder}/fit")
        light = {"num_cpus": self.resources.read.num_cpus}
        with self._phase("list the calibration source"):
            num_shards = ray.get(plan.options(**light).remote(listed, None))
            at_once = self.resources.read.max_actors
            asked = (_list.options(**light), listed, range(num_shards), at_once)
            for _ in by_shard(*asked, self.session.check):
                pass
            ray.get(_mark.options(**light).remote(listed, num_shards))
        return listed, num_shards

    # -- the stream --------------------------------------------------------------------------

    def stream(self) -> None:
        """Encodes, compresses, writes and commits what is left to do."""
        if not self.shards_to_do:
            return
        # Fragments that were committed are safe; those still on the way are redone by the next run.
        pending = Pending()
        self.progress.stream_started = time.time()
        self.report(f"{self.progress.to_do:,} items to do: actors start and load the encoder")
        start = time.perf_counter()
        said = committed = start
        with self._phase("stream"):
            try:
                for written in rows_of(self._dataset()):
                    if written is not None:
                        self.progress.first_written = self.progress.first_written or time.time()
                        pending.add(written)
                    now = time.perf_counter()
                    due = now - committed > self.spec.commit_seconds
                    if pending.num_items >= self.spec.commit_items or (pending.rows and due):
                        self._commit(pending)
                        pending, committed = Pending(), now
                    if now - said > 5:
                        self.report(self.progress.line(now - start))
                        said = now
                    self.session.check()
            finally:
                if pending.rows and self.session.may_commit:
                    self._commit(pending)
        self.report(self.progress.line(time.perf_counter() - start))

    def _dataset(self) -> ray.data.Dataset:
        spec, resources = self.spec, self.resources
        configure_ray_data()
        units = read_stage(self.listing, self.shards_to_do, spec.unit_items, resources.read)
        wanted = every_representation(spec)
        encode = encode_stage(spec, self.facts, wanted, spec.rerank)
        compress = Compress(self.facts, wanted, self.learned, self.encoder_columns)
        encode.placement = resources.placement
        groups: list[tuple[list[Stage], Resources]] = []
        if resources.prepare is not None and encode.prepares:
            groups.append(([Prepare(spec.encoder)], resources.prepare))
            encode.prepares = False
        if resources.compress is None:
            groups.append(([Represent(encode, compress)], resources.encode))
        else:
            groups += [([encode], resources.encode), ([compress], resources.compress)]
        payload = self.listing.build_source().payload
        units = chain(units, groups, [*ITEM.names, *payload.names])
        return units.map_batches(
            WriteFragments,
            fn_constructor_kwargs={"index": part(spec.index)},
            batch_size=max(1, spec.fragment_items // spec.unit_items),
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ray.data.ActorPoolStrategy(
                min_size=resources.write.min_actors, max_size=resources.write.max_actors
            ),
            num_cpus=resources.write.num_cpus,
        )

    def _commit(self, pending: Pending) -> None:
        if pending.fragments:
            self.writer.commit(pending.fragments, pending.replaced)
        else:
            self.writer.renew()  # rejects only: still, nobody without the lease writes
        rejects = pa.concat_tables(pending.rejects)
        spec = pc.fill_null(rejects["spec"], self.listing.spec_digest)  # stages do not know it
        rejects = rejects.set_column(REJECT.get_field_index("spec"), REJECT.field("spec"), spec)
        self.writer.set_rejects(rejects, pending.item_ids)
        progress = self.progress
        num_replaced = sum(map(len, pending.replaced.values()))
        progress.new += pending.num_items - num_replaced
        progress.replaced += num_replaced
        progress.rejected += sum(table.num_rows for table in pending.rejects)
        progress.gone += pending.gone
        progress.bytes += pending.num_bytes
        progress.commits += 1
        for name, spent in pending.seconds.items():
            progress.seconds[name] = progress.seconds.get(name, 0.0) + spent
        progress.first_commit = progress.first_commit or time.time()
        progress.last_commit = time.time()
        self.session.record("running")

    # -- the end -----------------------------------------------------------------------------

    def remove_missing(self) -> None:
        """Removes the rows of this source that the listing no longer has, in one commit.

        Raises:
            JobError: parts of the source cannot be read: whatever they hold would look removed.
        """
        if self.num_unreadable:
            raise JobError(
                f"nothing was removed: {self.num_unreadable} parts of the source cannot be read at"
                " present (see the rejects); all else is done"
            )
        collections = self.listing.build_source().collections
        gone = ray.get(_gone.remote(self.listing, self.num_shards, collections))
        self.writer.remove(gone)
        self.progress.removed = sum(map(len, gone.values()))
        self.report(f"removed {self.progress.removed:,} items that the source no longer lists")

    def report_truncated(self) -> None:
        """Counts and names the files of this source of which only the beginning could be read."""
        found = ray.get(_truncated.remote(self.spec))
        self.progress.truncated = len(found)
        if found:
            named = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
            self.report(
                f"truncated files, indexed as far as they can be read: {len(found):,}: {named}"
            )

    def finish(self) -> None:
        """Checks that every listed item is accounted for.

        Raises:
            JobError: listed differs from indexed + rejected.
        """
        progress = self.progress
        self.writer.index_ids()
        rejected = progress.rejected_before + progress.rejected
        gone = f" + gone since {progress.gone:,}" if progress.gone else ""
        self.report(
            f"listed {progress.listed:,} = indexed {progress.indexed:,} ({progress.new:,} new,"
            f" {progress.replaced:,} replaced, {progress.unchanged:,} as before)"
            f" + rejected {rejected:,}{gone}; {progress.commits} commits"
        )
        if progress.listed != progress.indexed + rejected + progress.gone:
            raise JobError("the sum does not hold: items were lost on the way; run it again")


def by_shard(
    task: Any, job: ListingJob, shards: Iterable[int], at_once: int, check: Callable[[], None]
) -> Iterator[Any]:
    """What a task gives of each shard, `at_once` of them at a time.

    More than the profile lets read would start a process each, and on a small machine that takes
    longer than the listing.

    Args:
        check: raises what ends the job.
    """
    waiting, shards = [], iter(shards)
    while True:
        while len(waiting) < at_once and (shard := next(shards, None)) is not None:
            waiting.append(task.remote(job, shard))
        if not waiting:
            return
        ready, waiting = ray.wait(waiting, timeout=1.0)
        check()
        yield from ray.get(ready)


def refuse_other_encoders(schema: pa.Schema, facts: EncoderFacts) -> None:
    """Raises `SpecError` if columns of the encoder's space were made by another one."""
    for name, about in by_role(schema, "search", "single").items():
        prefix = about.get("columns", about["encoder"]["name"])
        if prefix == facts.prefix and about["fingerprint"] != facts.fingerprint:
            raise SpecError(
                "encoder",
                facts.spec["name"],
                f"the encoder with which {name!r} was made (fingerprint"
                f" {about['fingerprint']}; this one has {facts.fingerprint})",
                "differs from the index's",
            )


def own_fields(facts: EncoderFacts, spec: IndexSpec) -> list[pa.Field]:
    """The columns that the encoder fills once for all representations."""
    aspects = aspects_of(every_representation(spec))
    kept = kept_taps(spec, facts)
    return [f for a in aspects for f in encoder_fields(facts.about(a), spec.keep_positions, kept)]


def kept_taps(spec: IndexSpec, facts: EncoderFacts) -> tuple[Tap, ...]:
    """The taps of one layer each that are stored."""
    return single_taps(map(Tap.parse, spec.keep_taps), facts.num_layers or 0)


def encode_stage(
    spec: IndexSpec,
    facts: EncoderFacts,
    representations: Sequence[Representation],
    rerank: str | None = None,
) -> Encode:
    """The stage that encodes all that representations, and the columns that are kept, are of."""
    taps = {*taps_of(representations, facts.num_layers), *kept_taps(spec, facts)}
    aspects = aspects_of(representations)
    return Encode(spec.encoder, facts, aspects, sorted(taps), rerank)


def read_stage(
    listing_job: ListingJob, shards: Sequence[int], unit_items: int, pool: Resources
) -> ray.data.Dataset:
    """The units that are to be done of some shards, each a packed row, read in tasks."""

    def read(block: dict[str, np.ndarray]) -> Iterator[pa.Table]:
        keep_memory()
        start = time.perf_counter()
        for shard in block["shard"]:
            for unit in listing.read_units(listing_job, int(shard), unit_items):
                unit.seconds["read"] = time.perf_counter() - start
                yield packed_table([unit])
                start = time.perf_counter()

    rows = [{"shard": shard} for shard in shards]
    return ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        read,
        batch_size=None,
        num_cpus=pool.num_cpus,
        compute=ray.data.TaskPoolStrategy(size=min(pool.max_actors, len(rows))),
    )


@dataclass
class Pending:
    """What was written and waits for its commit."""

    rows: int = 0
    fragments: list[FragmentMetadata] = field(default_factory=list)
    replaced: dict[int, list[str]] = field(default_factory=dict)
    rejects: list[pa.Table] = field(default_factory=lambda: [REJECT.empty_table()])
    item_ids: list[str] = field(default_factory=list)
    gone: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def num_items(self) -> int:
        """Items whose rows wait."""
        return len(self.item_ids)

    def add(self, written: dict[str, Any]) -> None:
        """Adds a row of `stages.WRITTEN`."""
        about = json.loads(written["about"])
        self.rows += 1
        fragments = json.loads(written["fragments"])
        self.fragments += [FragmentMetadata.from_json(json.dumps(f)) for f in fragments]
        for fragment, ids in about["replaces"].items():
            self.replaced.setdefault(int(fragment), []).extend(ids)
        self.rejects.append(from_ipc(written["rejects"]))
        self.item_ids += about["item_ids"]
        self.gone += about["gone"]
        self.num_bytes += about["bytes"]
        for name, spent in about["seconds"].items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


plan = ray.remote(listing.plan)
_list = ray.remote(listing.list_shard)
_mark = ray.remote(listing.mark_duplicates)
_unlisted = ray.remote(listing.unlisted_rejects)
_gone = ray.remote(listing.gone_rows)


@ray.remote
def facts_of(spec: Spec) -> EncoderFacts:
    """The facts of the encoder of a spec, which is loaded for them."""
    with within("encoder"):
        return EncoderFacts.of(ENCODERS.build(spec), spec)


@ray.remote
def _remarks(spec: IndexSpec) -> list[str]:
    def ids() -> Iterator[str]:
        index = Index(spec.index)
        for batch in index.batches(["item_id", "parent_id"], batch_rows=65_536):
            for column in batch.columns:
                yield from column.to_pylist()
        yield from index.rejects()["item_id"].to_pylist()

    remarks = ENCODERS.load(spec.encoder.name).remarks(spec.encoder, ids)
    return [*remarks, *compressor_remarks(Index(spec.index).dataset, every_representation(spec))]


@ray.remote
def _truncated(spec: IndexSpec) -> list[str]:
    """The files of a spec's source that are truncated, each with how much of it can be read."""
    parts = SOURCES.load(spec.source.name).parts(spec.source)
    if not any({"frames", "audio"} & set(SOURCES.load(part.name).gives) for part in parts):
        return []
    names = ", ".join(map(quote, source_of(spec).collections))
    rows = Index(spec.index).batches(
        ["parent_id", "metadata"],
        where=f"""source IN ({names}) AND metadata LIKE '%"truncated": true%'""",
    )
    files = {row["parent_id"]: json.loads(row["metadata"]) for b in rows for row in b.to_pylist()}
    return [
        f"{name} ({about['duration']:g}"
        + (f" of {about['stated_duration']:g}" if "stated_duration" in about else "")
        + " s)"
        for name, about in sorted(files.items())
    ]


@ray.remote
def _preview(spec: IndexSpec, limit: int | None) -> tuple[pa.Table, int, list[Reject]]:
    """The first items decoded, how many items there are, and what cannot be listed."""
    return listing.preview(source_of(spec), limit, num_sample=32)


@ray.remote
def _trial(spec: IndexSpec, items: pa.Table) -> dict[str, Any]:
    """Encodes and compresses a few items: tokens an item, items per second, bytes by column.

    Nothing is fitted: compressors that learn are left out, and of codecs that learn the bytes are
    known without.
    """
    with within("encoder"):
        facts = EncoderFacts.of(ENCODERS.build(spec.encoder), spec.encoder)
    if spec.rerank is not None:
        rerank_field(spec.rerank, facts)  # raises if it is of another encoder
    plain = CODECS.resolve("float16")
    every = every_representation(spec)
    codecs = {r.id: codec for r in every if (codec := CODECS.build(r.codec)).needs_fit}
    tried = [r.model_copy(update={"codec": plain}) if r.id in codecs else r for r in every]
    tried = [r for r in tried if not needs_fit(r)]
    columns = [column.name for column in own_fields(facts, spec)]
    encode = encode_stage(spec, facts, tried, spec.rerank)
    stage = Represent(encode, Compress(facts, tried, {}, columns))
    stage.setup()
    start = time.perf_counter()
    unit = run_stage(stage, Unit("trial", items))
    elapsed = time.perf_counter() - start
    table = unit.items
    there = [name for name in stage.adds if name in table.column_names]
    num_bytes = {name: table[name].nbytes / items.num_rows for name in there}
    for name in codecs.keys() & num_bytes.keys():
        vectors, lengths = flat_from_arrow(table[name])
        token_bytes = codecs[name].token_bytes(vectors.shape[1])
        num_bytes[name] = int(lengths.sum()) * token_bytes / items.num_rows
    return {
        "tokens": stage.num_tokens / items.num_rows,
        "rate": items.num_rows / elapsed,
        "bytes": num_bytes,
        "rejects": unit.rejects["reason"].to_pylist(),
    }


def _readable(stage: Encode, items: pa.Table) -> Iterator[pa.Table]:
    """Items with all that their encoder reads; those that it cannot read are left out."""
    try:
        yield stage.prepare(items)
        return
    except Unreadable:
        pass
    for row in range(items.num_rows):
        with contextlib.suppress(Unreadable):
            yield stage.prepare(items.slice(row, 1))


@ray.remote
def _fit(
    job: ListingJob,
    num_shards: int,
    drawn: FitSample,
    stage: Encode,
    representation: Representation,
) -> Learned:
    stage.setup()
    taps = COMPRESSORS.build(representation.compressor).needs_taps
    hashes: set[int] = set()

    def sample() -> Iterator[TokenBatch]:
        for items in listing.sample_items(job, num_shards, drawn.num_items, drawn.seed):
            for prepared in _readable(stage, items):
                content_N = listing.content_hashes(prepared)
                for _, rows, batch, _ in stage.batches(prepared):
                    if len(batch):
                        hashes.update(content_N[rows].tolist())
                        yield with_taps(batch, taps, stage.facts)
        if not hashes:
            legal = "a source with at least one item that can be read"
            problem = f"has nothing to fit {representation.id} on"
            field = "fit.source" if drawn.source else "source"
            raise SpecError(field, job.source.name, legal, problem)

    learned = fit(representation, sample, drawn.seed)
    origin = {"source": dump(drawn.source)} if drawn.source else {}
    return learned._replace(sample=Sample(origin, np.array(sorted(hashes), np.uint64)))
