"""Plan of an index job, from assumptions and from a trial of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pipeline.compression import Budget
from pipeline.config import MissingField, SpecError
from pipeline.eval.planning.estimate import Estimate, Pool, StageTime, estimate, num_actors, startup
from pipeline.eval.planning.spec import Assumptions, Prices
from pipeline.eval.planning.trial import Listed, Trial, list_items, run_trial
from pipeline.index.checks import check, check_resources
from pipeline.index.columns import Representation, all_representations, represented_fields
from pipeline.index.in_process import current
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.stages import needs_preparing
from pipeline.paths import locate
from pipeline.registry import CODECS

GIVEN, MEASURED = "given", "measured"


@dataclass(frozen=True)
class Plan:
    """Time, storage and cost of an index job.

    Attributes:
        payload_bytes: Size of a decoded item, or None if it is unknown.
        stored_bytes: Size of the index, per item.
        origins: `GIVEN` or `MEASURED` by stage.
        trial: The trial, or None if everything was given.
    """

    num_items: int
    tokens: float
    source_bytes: float | None
    payload_bytes: float | None
    column_bytes: Mapping[str, float]
    stored_bytes: float
    estimate: Estimate
    origins: Mapping[str, str]
    prices: Prices
    trial: Trial | None

    @property
    def storage_price(self) -> float:
        """Price of storing the index for one month."""
        return self.num_items * self.stored_bytes / 1e9 * self.prices.gb_month


def stage_pools(spec: IndexSpec, resources: IndexResources) -> list[Pool]:
    """Returns the pools of actors of an index job, in the order of their stages."""
    prepares = needs_preparing(spec.encoder, represented_fields(all_representations(spec)))
    pools = [Pool(("read",), resources.read)]
    encoding: list[str] = []
    if prepares and resources.prepare is not None:
        pools.append(Pool(("prepare",), resources.prepare))
    elif prepares:
        encoding.append("prepare")
    encoding.append("encode")
    if resources.compress is None:
        encoding.append("compress")
    pools.append(Pool(tuple(encoding), resources.encode))
    if resources.compress is not None:
        pools.append(Pool(("compress",), resources.compress))
    return [*pools, Pool(("write",), resources.write)]


def is_complete(assumptions: Assumptions, pools: list[Pool]) -> bool:
    """Checks whether the assumptions suffice for a plan without any measurement."""
    stages = {stage for pool in pools for stage in pool.stages}
    known = (assumptions.num_items, assumptions.tokens, assumptions.dim)
    return None not in known and stages <= assumptions.rates.given().keys()


def make_plan(
    spec: IndexSpec,
    resources: IndexResources,
    assumptions: Assumptions,
    *,
    limit: int | None = None,
    sample_size: int = 64,
    max_seconds: float = 60.0,
    report: Callable[[str], None],
) -> Plan:
    """Plans an index job. Nothing is written.

    What the assumptions do not contain is measured: the source is listed, and a random sample of
    its items passes through the stages on the connected Ray cluster, where no unit starts after
    `max_seconds`.

    Raises:
        JobError: All items of the sample are rejected.
    """
    check_resources(spec, resources)
    pools = stage_pools(spec, resources)
    given = assumptions.rates.given()
    stages = [stage for pool in pools for stage in pool.stages]
    for stage in given.keys() - set(stages):
        raise SpecError(f"rates.{stage}", given[stage], "null, because the job has no such stage")
    times = {stage: StageTime(1 / rate) for stage, rate in given.items()}
    num_cpus: float | None = assumptions.num_cpus
    if is_complete(assumptions, pools):
        return _plan(spec, assumptions, pools, times, num_cpus)
    spec = check(spec)
    report("listing the source")
    listed = list_items(spec, resources, limit, sample_size)
    num_rejects = len(listed.rejects)
    report(f"listed {listed.num_items + num_rejects:,} items, {num_rejects:,} unreadable")
    if not listed.sample:
        rule = "a source with at least one item"
        raise SpecError("source.path", getattr(spec.source, "path", None), rule, "has none")
    report(f"processing a sample of {sum(len(wanted) for _, wanted in listed.sample):,} items")
    trial = run_trial(spec, resources, listed, max_seconds)
    report(f"processed {trial.num_items:,} items, {len(trial.rejects):,} rejected")
    for stage in stages:
        # A stage that takes less than a millisecond is not recorded.
        times.setdefault(stage, trial.times.get(stage, StageTime(1e-9, 0.0)))
    if "read" not in given and not spec.build_source().stores_listing:
        seconds, cores = times["read"]
        listing = listed.seconds / max(1, listed.num_items + num_rejects)  # the job lists it again
        times["read"] = StageTime(seconds + listing, (cores or 0.0) + listing)
    if num_cpus is None:
        num_cpus = current().num_cpus
    return _plan(spec, assumptions, pools, times, num_cpus, trial, listed)


def _plan(
    spec: IndexSpec,
    assumptions: Assumptions,
    pools: list[Pool],
    times: Mapping[str, StageTime],
    num_cpus: float | None,
    trial: Trial | None = None,
    listed: Listed | None = None,
) -> Plan:
    num_listed = listed.num_items if listed else 0
    num_items = assumptions.num_items or num_listed
    tokens, dim = assumptions.tokens, assumptions.dim
    if trial is not None and tokens is None:
        tokens, column_bytes = trial.tokens, trial.column_bytes
        other_bytes = trial.stored_bytes - sum(column_bytes.values())
    else:
        tokens, dim = tokens or 0.0, dim or (trial.dim if trial else 0)
        column_bytes = {r.id: _vector_bytes(r, tokens, dim) for r in all_representations(spec)}
        other_bytes = 0.0
    if assumptions.other_bytes is not None:
        other_bytes = assumptions.other_bytes
    startup_seconds = assumptions.startup_seconds
    if startup_seconds is None and listed is not None:
        startup_seconds = startup(
            listed.seconds,
            listed.loading_seconds,
            sum(num_actors(pools, num_items, spec.unit_items)),
            current().num_cpus,
        )
    source_bytes, payload_bytes = assumptions.source_bytes, assumptions.payload_bytes
    if trial is not None:
        if source_bytes is None and num_listed:
            size = _size(spec)
            source_bytes = None if size is None else size / num_listed
        payload_bytes = trial.payload_bytes if payload_bytes is None else payload_bytes
    given = assumptions.rates.given()
    return Plan(
        num_items=num_items,
        tokens=tokens,
        source_bytes=source_bytes,
        payload_bytes=payload_bytes,
        column_bytes=column_bytes,
        stored_bytes=sum(column_bytes.values()) + other_bytes,
        estimate=estimate(num_items, spec.unit_items, times, pools, num_cpus, startup_seconds or 0),
        origins={stage: GIVEN if stage in given else MEASURED for stage in times},
        prices=assumptions.prices,
        trial=trial,
    )


def _vector_bytes(representation: Representation, tokens: float, dim: int) -> float:
    """Returns the size of the vectors of an item with a given number of tokens."""
    compressor = representation.compressor
    length = torch.tensor([math.ceil(tokens)])
    if compressor.name == "none":
        num_vectors = tokens
    elif isinstance(compressor, Budget) and (compressor.num_vectors or compressor.ratio):
        num_vectors = float(compressor.budgets(length)[0])
    elif (budget := getattr(compressor, "num_vectors", None)) is not None:
        num_vectors = min(tokens, budget)
    else:
        raise MissingField(
            f"representations.{representation.id}.compressor.num_vectors",
            None,
            "a number if `tokens` is given, because nothing is compressed",
        )
    return num_vectors * CODECS.build(representation.codec).token_bytes(dim)


def _size(spec: IndexSpec) -> float | None:
    path = getattr(spec.source, "path", None)
    if not isinstance(path, str):
        return None
    fs, root = locate(path)
    return float(fs.du(root)) if fs.exists(root) else None
