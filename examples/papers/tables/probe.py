"""One item and one query through the steps of a table, for its check, in this process."""

from __future__ import annotations

import math
import posixpath
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch

from examples.papers.studies import study
from examples.papers.tables import latency
from pipeline.config import JobError, SpecError, digest, within
from pipeline.data.base import Source, items_table
from pipeline.encoders import Encoder
from pipeline.eval import Benchmark, BenchmarkRow, JudgedQueries, Phrase, evaluation
from pipeline.eval.grounding import BENCHMARK_PHRASES
from pipeline.eval.level import judged_level
from pipeline.eval.planning.estimate import StageTime, estimate
from pipeline.eval.planning.run import stage_pools
from pipeline.eval.results import RESULTS
from pipeline.eval.spec import EvaluateSpec
from pipeline.index import checks
from pipeline.index.artefacts import Sample
from pipeline.index.columns import Representation, all_representations
from pipeline.index.fitting import LearnedState, fit, fitted_fields, needs_fit, trained_state
from pipeline.index.fragments import write_table
from pipeline.index.info import EncoderInfo
from pipeline.index.listing import content_hashes, scan
from pipeline.index.plan import plan_columns
from pipeline.index.reader import ITEMS, IndexReader, part_uri
from pipeline.index.recompress import Recompression, RecompressResources, RecompressSpec
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stage import Unit, run_stage
from pipeline.index.stages import Compress
from pipeline.index.stream import encode_stage
from pipeline.index.token_columns import token_batches, with_taps
from pipeline.index.writer import IndexWriter
from pipeline.registry import BENCHMARKS, COMPRESSORS, ENCODERS, LEARNERS
from pipeline.runtime.atomic import write_atomic
from pipeline.schema import Item, Reject
from pipeline.search.query import encode
from pipeline.tokens import TokenBatch
from pipeline.train import loop
from pipeline.train.checkpoints import Checkpoints
from pipeline.train.data.base import TrainingData
from pipeline.train.data.row_data import NO_DOCUMENT
from pipeline.train.spec import TrainSpec

#: Documents of a batch of training, the minimum.
BATCH_SIZE = 2
#: Vectors to which compressors and codecs are fitted: copies of those of one item, with noise.
NUM_FIT_VECTORS, NOISE = 4096, 0.1
#: Share of the items and of the judged documents that a published data set may lack.
MAX_LACKING = 0.01
#: Size of the largest model whose training step is computed on a CPU, in bytes.
MAX_TRAINED = 2e9
#: Part of a step that a problem concerns.
DATA, MODEL, STEP = "data", "model", "step"


class Cost(NamedTuple):
    """Cost of a step, estimated from one item on this machine and a resources profile.

    Attributes:
        items: Number of items, queries or training documents.
        disk: Bytes that the step writes.
        memory: Bytes of the weights and, in training, of gradients and states of the optimiser.
        seconds: Time, or None if it was not measured.
        gpu_hours: Reserved GPUs times the time.
    """

    items: int = 0
    disk: float = 0.0
    memory: int = 0
    seconds: float | None = None
    gpu_hours: float = 0.0


class Rejected(JobError):
    """An item that can be read, and that the encoder does not accept."""


class Place(NamedTuple):
    """Shard, position and parent of an item."""

    shard: int
    position: int
    parent: str


@dataclass
class Listing:
    """Items of a source.

    Attributes:
        places: Places by item id.
        parents: First item by parent id.
        rejects: Items that cannot be listed.
    """

    source: Source
    shards: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)

    @classmethod
    def read(cls, source: Source) -> Listing:
        """Lists all items."""
        listing = cls(source)
        for number, shard in enumerate(source.shards()):
            listing.shards.append(shard)
            for position, entry in scan(source, {"shard": shard, "limit": None}):
                if isinstance(entry, Reject):
                    listing.rejects.append(entry)
                else:
                    place = Place(number, position, entry.parent_id)
                    listing.places.setdefault(entry.item_id, place)
                    listing.parents.setdefault(entry.parent_id, entry.item_id)
        return listing

    def batches(self, columns: Sequence[str], filter: str | None = None) -> Iterator[pa.Table]:
        """Yields the ids, like an index that has all items."""
        parents = [place.parent for place in self.places.values()]
        yield pa.table({"item_id": list(self.places), "parent_id": parents}).select(list(columns))

    def item_of(self, name: str) -> str | None:
        """Returns the item with the id of an item or a parent."""
        return name if name in self.places else self.parents.get(name)

    def decode(self, item_id: str) -> pa.Table:
        """Decodes an item."""
        place = self.places[item_id]
        shard = self.shards[place.shard]
        entries = scan(self.source, {"shard": shard, "limit": place.position + 1})
        item = next(entry for position, entry in entries if position == place.position)
        assert isinstance(item, Item)
        (decoded,) = self.source.decode(shard, [(place.position, item)])
        if isinstance(decoded, Reject):
            raise JobError(f"{item_id} cannot be read: {decoded.reason} {decoded.detail}")
        return items_table([decoded], self.source.payload)


class OneQuery(Benchmark[Any]):
    """A benchmark with one of its queries and the document of one item."""

    def __init__(self, inner: Benchmark, judged: JudgedQueries):
        super().__init__(inner.spec)
        self.inner, self.judged = inner, judged

    def load(self) -> JudgedQueries:
        """Returns the query."""
        return self.judged

    def phrases(self) -> list[Phrase]:
        """Returns the phrases of the benchmark."""
        return self.inner.phrases()

    def write_result(self, folder: str, row: BenchmarkRow) -> str | None:
        """Writes a row in the official format of the benchmark."""
        return self.inner.write_result(folder, row)


class Judged(NamedTuple):
    """Loaded benchmark, and the ids of its items with phrases, if they are needed."""

    benchmark: Benchmark
    queries: JudgedQueries
    grounded: frozenset[str]

    def first(self, listing: Listing) -> tuple[str, str]:
        """Returns the first query with a relevant document in a listing, and this document."""
        for query, grades in self.queries.qrels.items():
            for document, grade in grades.items():
                item = listing.item_of(document)
                if grade > 0 and item and (not self.grounded or item in self.grounded):
                    return query, document
        name = self.benchmark.spec.name
        raise SpecError("benchmark", name, "a benchmark that judges an item of the source")

    def only(self, query: str, document: str) -> JudgedQueries:
        """Returns one query with one relevant document."""
        judged = self.queries
        vectors = judged.vectors
        return replace(
            judged,
            queries={query: judged.queries[query]},
            qrels={query: {document: 1}},
            categories={},
            vectors=vectors and {query: vectors[query]},
            media={p: {query: f[query]} for p, f in judged.media.items() if query in f},
            pools=judged.pools and {query: [document]},
        )


class Built(NamedTuple):
    """Index of one item.

    Attributes:
        disk: Bytes of the item.
        memory: Bytes of the weights of the encoder.
        times: Time of the item in each stage.
        query_seconds: Time to encode a query.
    """

    uri: str
    item_id: str
    disk: float
    memory: int
    times: dict[str, StageTime]
    query_seconds: float


class Probe:
    """Runs steps on one item. Data are read once, and of equal steps only the first one runs.

    Attributes:
        part: Part of the step that is being checked.
        notes: Remarks that are no problems.
        same: Output with the results of an evaluation, by its own output.
    """

    def __init__(self, resources: IndexResources) -> None:
        self.part, self._resources = STEP, resources
        self.notes: dict[str, None] = {}
        self.same: dict[str, str] = {}
        self._data: dict[str, TrainingData] = {}
        self._listings: dict[str, Listing] = {}
        self._judged: dict[str, Judged] = {}
        self._built: dict[str, Built] = {}  # by everything that affects it
        self._indexes: dict[str, Built] = {}  # by URI
        self._evaluated: dict[str, str] = {}

    def note(self, text: str) -> None:
        """Adds a remark once."""
        self.notes[text] = None

    # -- training ----------------------------------------------------------------------------------

    def train(self, spec: study.StudySpec) -> Cost:
        """Reads a batch, builds the learner, computes a loss, and writes the untrained model."""
        costs = [self._train(run.spec) for run in study.runs_of(spec)]
        seconds = [cost.seconds for cost in costs if cost.seconds is not None]
        total = sum(seconds) if len(seconds) == len(costs) else None
        items, disk = sum(cost.items for cost in costs), sum(cost.disk for cost in costs)
        return Cost(items, disk, max(cost.memory for cost in costs), total)

    def _train(self, spec: TrainSpec) -> Cost:
        self.part = DATA
        key = digest([spec.data.model_dump(), spec.seed])
        if key not in self._data:
            self._data[key] = loop.data_of(spec)
        data = self._data[key]
        self.part = MODEL
        data.batch_size = spec.batch_size
        loop.check(spec, data)
        num_steps = data.num_batches // spec.gradient_accumulation_steps * spec.epochs
        num_steps = min(num_steps, spec.max_steps or num_steps)
        num_documents = num_steps * spec.gradient_accumulation_steps * spec.batch_size
        self.part = DATA
        data.batch_size = BATCH_SIZE
        batch = next(data.batches(0, 0, 0, 1))
        if NO_DOCUMENT in batch.document_keys:
            raise SpecError("data", spec.data.name, "data whose first documents can be read")
        self.part = MODEL
        cache = {"hidden_states_cache": None}  # filling it would encode all documents
        learner = LEARNERS.build(spec.learner.model_copy(update=cache))
        inputs = learner.read(batch)
        parameters = list(learner.parameters())
        size = sum(p.numel() * p.element_size() for p in parameters)
        seconds = None
        if torch.cuda.is_available() or size <= MAX_TRAINED:
            start = time.perf_counter()
            with torch.no_grad():
                embedded = learner(learner.mini_batches(inputs, len(batch.documents))[0])
                loss, _ = learner.loss(embedded, batch, data)
            if not math.isfinite(loss.item()):
                raise JobError(f"the loss of a batch is {loss.item()}")
            # The backward pass takes twice as long as the forward pass.
            seconds = 3 * (time.perf_counter() - start) / BATCH_SIZE * num_documents
        else:
            self.note(f"not run: the loss of {spec.name}, because the model is large for a CPU")
        self.part = STEP
        folder = Path(spec.output) / "model"
        Checkpoints(spec).publish(folder, learner)
        disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return Cost(num_documents, float(disk), size + 12 * trained, seconds)

    # -- indexing ----------------------------------------------------------------------------------

    def index(
        self,
        spec: IndexSpec,
        recompressions: Sequence[RecompressSpec],
        evaluations: Sequence[EvaluateSpec],
    ) -> Cost:
        """Lists the source and indexes one item, one that the first evaluation judges."""
        listing = self.listing(spec)
        query: Any = None
        judged, item_id = None, next(iter(listing.places))
        for each in evaluations[:1]:
            judged = self.load(each)
            query_id, document = judged.first(listing)
            query = next(judged.queries.inputs([query_id]))
            item_id = listing.item_of(document) or item_id
        start = time.perf_counter()
        items = listing.decode(item_id)
        reading = StageTime(time.perf_counter() - start)
        self.part = MODEL
        checks.check(spec)
        wanted = [*all_representations(spec)]
        for recompression in recompressions:
            stored = {r.id for r in wanted}
            wanted += [r for r in all_representations(recompression) if r.id not in stored]
        settings = [spec.model_dump(exclude={"index", "source", "fit"})]
        settings += [each.model_dump(exclude=PATHS) for each in evaluations]
        kinds = [name for name in self._kinds(items)] + [type(query).__name__]
        key = digest([settings, [r.model_dump() for r in wanted], kinds])
        if key not in self._built:
            instruction = judged.queries.instruction if judged else None
            built = build(spec, wanted, items, query, instruction)
            self._built[key] = built._replace(times={**built.times, "read": reading})
        built = self._indexes[spec.index] = self._built[key]
        count, pools = len(listing.places), stage_pools(spec, self._resources)
        instant = {stage: StageTime(1e-9) for pool in pools for stage in pool.stages}
        found = estimate(count, spec.unit_items, {**instant, **built.times}, pools, None, 0.0)
        disk, seconds = count * built.disk, found.stream_seconds
        return Cost(count, disk, built.memory, seconds, found.gpu_hours)

    @staticmethod
    def _kinds(items: pa.Table) -> list[str]:
        return [name for name in items.column_names if items[name][0].is_valid]

    def listing(self, spec: IndexSpec) -> Listing:
        """Lists the source of an index."""
        self.part = DATA
        key = digest([spec.source.model_dump(), spec.payload()])
        if key not in self._listings:
            source = spec.build_source()
            with within("source"):
                source.check()
            self._listings[key] = Listing.read(source)
        listing = self._listings[key]
        if rejects := listing.rejects:
            first = f"{rejects[0].item_id}: {rejects[0].reason} {rejects[0].detail}"
            problem = f"{len(rejects):,} items cannot be listed, such as {first}"
            self._tolerate(len(rejects), len(listing.places), problem)
        if not listing.places:
            raise SpecError("source", spec.source.name, "a source with items", "has none")
        return listing

    def latency(self, spec: latency.LatencySpec) -> Cost:
        """Measures one item on the CPU."""
        start = time.perf_counter()
        latency.run(spec.model_copy(update={"num_items": 1, "device": "cpu"}))
        return Cost(spec.num_items, 0, 0, spec.num_items * (time.perf_counter() - start))

    def recompress(self, spec: RecompressSpec) -> Cost:
        """Checks representations, which the index of one item has already."""
        self.part = STEP
        built = self._indexes[spec.index]
        fit_index = spec.fit_index and self._indexes[spec.fit_index].uri
        changes = {"index": built.uri, "fit_index": fit_index}
        Recompression(spec.model_copy(update=changes), RecompressResources())
        return Cost()

    # -- evaluation --------------------------------------------------------------------------------

    def load(self, spec: EvaluateSpec) -> Judged:
        """Loads the queries and judgments of an evaluation."""
        self.part = DATA
        grounds = spec.grounding == BENCHMARK_PHRASES
        key = digest([spec.benchmark.model_dump(), grounds])
        if key not in self._judged:
            benchmark = BENCHMARKS.build(spec.benchmark)
            queries = benchmark.load()
            grounded = frozenset(p.item_id for p in benchmark.phrases()) if grounds else frozenset()
            self._judged[key] = Judged(benchmark, queries, grounded)
        return self._judged[key]

    def evaluate(self, spec: EvaluateSpec, index: IndexSpec) -> Cost:
        """Evaluates one query on the index of one item."""
        judged, listing = self.load(spec), self.listing(index)
        judged_level(cast(IndexReader, listing), judged.queries, spec.judged, None)
        grades = [pair for by_id in judged.queries.qrels.values() for pair in by_id.items()]
        names = {document for document, grade in grades if grade > 0}
        names |= {name for pool in (judged.queries.pools or {}).values() for name in pool}
        if unknown := [name for name in names if listing.item_of(name) is None]:
            number = f"{len(unknown):,} of {len(names):,} judged documents"
            problem = f"{number} are not in the source, such as {min(unknown)}"
            self._tolerate(len(unknown), len(names), problem)
        built = self._indexes[spec.index]
        query, document = judged.first(listing)
        probed = judged.only(query, document)
        kind = type(next(probed.inputs([query]))).__name__
        settings = [spec.model_dump(exclude=PATHS), spec.benchmark.name, built.uri]
        key = digest([settings, kind, probed.instruction])
        self.part = STEP
        if key not in self._evaluated:
            if listing.item_of(document) != built.item_id:
                probed = judged.only(query, built.item_id)
                probed = replace(probed, qrels={query: {built.item_id: 1}})
            benchmark = OneQuery(judged.benchmark, probed)
            changed = spec.model_copy(update={"index": built.uri})
            result = evaluation.run(changed, lambda line: None, benchmark=benchmark)
            write_atomic(posixpath.join(spec.output, RESULTS), result.to_json())
            self._evaluated[key] = spec.output
        self.same[spec.output] = self._evaluated[key]
        count = len(judged.queries.queries)
        return Cost(count, memory=built.memory, seconds=count * built.query_seconds)

    def _tolerate(self, count: int, total: int, problem: str) -> None:
        if count > MAX_LACKING * total:
            raise JobError(problem)
        self.note(problem)


#: Fields of the specs of evaluations that do not affect what is computed on one item.
PATHS = {"index", "output", "benchmark"}


def build(
    spec: IndexSpec,
    wanted: list[Representation],
    items: pa.Table,
    query: Any,
    instruction: str | None,
) -> Built:
    """Indexes one item with all representations, and encodes a query."""
    spec = spec.model_copy(update={"representations": wanted, "sweep": {}})
    encoder = ENCODERS.build(spec.encoder)
    info = EncoderInfo.from_encoder(encoder, spec.encoder)
    stage = encode_stage(spec, info, wanted, rerank=True).with_encoder(encoder)
    unit = _accepted(run_stage(stage, Unit("check", items)))
    writer = IndexWriter(spec.index, "check")
    try:
        columns = plan_columns(spec, info, writer)
        learned = {r.id: _learned(r, info, unit.items) for r in wanted}
        fields = [f for r in wanted for f in fitted_fields(spec.index, r, info, learned[r.id])]
        writer.add_columns([*columns.encoder_fields, *fields, *columns.rerank_fields])
        compress = Compress(info, wanted, learned, columns.encoder_columns).load()
        unit = _accepted(run_stage(compress, unit))
        fragments = write_table(unit.items, part_uri(spec.index, ITEMS))
        writer.commit(fragments)
    finally:
        writer.release()
    disk = sum(file.file_size_bytes or 0 for fragment in fragments for file in fragment.files)
    start = time.perf_counter()
    if query is not None:
        asking: Encoder = encoder.with_instruction(instruction) if instruction else encoder
        encode(asking, [query])
    query_seconds = time.perf_counter() - start
    times = {stage: StageTime(seconds) for stage, seconds in unit.seconds.items()}
    name = items["item_id"][0].as_py()
    return Built(spec.index, name, float(disk), _size(encoder), times, query_seconds)


def _size(encoder: Any) -> int:
    """Returns the bytes of the weights of an encoder."""
    model = getattr(getattr(encoder, "_inner", encoder), "model", None)
    if not isinstance(model, torch.nn.Module):
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _accepted(unit: Unit) -> Unit:
    for row in unit.rejects.to_pylist():
        raise Rejected(f"{row['item_id']} is rejected: {row['reason']} {row['detail']}".rstrip())
    return unit


def _learned(representation: Representation, info: EncoderInfo, items: pa.Table) -> LearnedState:
    """Fits a representation to copies of the vectors of one encoded item, with noise."""
    if not needs_fit(representation):
        return trained_state(representation, info)
    taps = COMPRESSORS.build(representation.compressor).needs_taps

    def sample() -> Iterator[TokenBatch]:
        generator = torch.Generator().manual_seed(0)
        for _, batch in token_batches(items, info, representation.field):
            tapped = with_taps(batch, taps, info)
            for _ in range(math.ceil(NUM_FIT_VECTORS / max(1, int(batch.mask.sum())))):
                noise = NOISE * torch.randn(batch.vectors.shape, generator=generator)
                yield replace(tapped, vectors=batch.vectors + noise)

    hashes_N = np.unique(content_hashes(items))
    return fit(representation, info, sample, seed=0)._replace(sample=Sample({}, hashes_N))
