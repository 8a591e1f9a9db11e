"""Faults: what happens to which process in which phase, drawn by a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeline.config import SpecError

#: Phases of the index job in their order, and the other jobs.
INDEX_PHASES = ("listing", "fitting", "encoding", "writing", "committing")
OTHER_JOBS = ("recompress", "backfill", "candidates", "maintain")
PHASES = (*INDEX_PHASES, *OTHER_JOBS)

#: Titles of the Ray workers by the role that the report names.
TITLES = {
    "task": (
        "ray::list_shard",
        "ray::_list_shard",
        "ray::_plan",
        "ray::describe_encoder",
        "ray::fit_representation",
        "ray::_fit",
        "ray::MapBatches(read_block)",
    ),
    "encoder": (
        "ray::MapWorker(MapBatches(StageActor))",
        "ray::MapWorker(MapBatches(CacheFragment))",
    ),
    "compressor": (
        "ray::MapWorker(MapBatches(FillFragment))",
        "ray::MapWorker(MapBatches(FillCodes))",
    ),
    "writer": ("ray::MapWorker(MapBatches(WriteFragments))",),
}

_EVERYWHERE = ("driver", "driver", "raylet", "gcs", "node", "disk", "network")
#: Targets of each phase. A target that is named twice is drawn twice as often.
TARGETS: dict[str, tuple[str, ...]] = {
    "listing": (*_EVERYWHERE, "task", "head", "clock"),
    "fitting": (*_EVERYWHERE, "task", "head"),
    "encoding": (*_EVERYWHERE, "encoder", "encoder", "writer", "head", "clock"),
    "writing": (*_EVERYWHERE, "encoder", "writer", "writer"),
    "committing": (*_EVERYWHERE, "encoder", "writer", "clock"),
    "recompress": (*_EVERYWHERE, "compressor", "compressor", "head", "clock"),
    "backfill": (*_EVERYWHERE, "encoder", "encoder", "head", "clock"),
    "candidates": (*_EVERYWHERE, "compressor", "compressor", "head", "clock"),
    "maintain": ("driver", "driver", "driver", "disk", "clock"),
}
#: What happens to a target, and how often relative to the others.
ACTIONS: dict[str, dict[str, int]] = {
    "driver": {"kill": 4, "pause": 1, "pause beyond the lease": 2},
    "task": {"kill": 3, "pause": 1},
    "encoder": {"kill": 3, "pause": 1},
    "compressor": {"kill": 3, "pause": 1},
    "writer": {"kill": 3, "pause": 1},
    "raylet": {"kill": 3, "pause": 1},
    "gcs": {"kill": 3, "pause": 1},
    "node": {"kill": 1},
    "head": {"kill": 1},
    "disk": {"full disk": 1},
    "clock": {"jump forward": 1, "jump backward": 1},
    "network": {
        "partition": 1,
        "partition beyond the health check": 2,
        "partition of the head": 1,
    },
}
#: Targets that exist only with worker nodes.
NODE_TARGETS = ("raylet", "node", "network")
#: Targets that are disturbed by default. The network requires root.
DEFAULT_TARGETS = tuple(target for target in ACTIONS if target != "network")
#: When a fault happens within a job other than that of the index: while its actors start, after a
#: random time, or when it writes a file or commits.
MOMENTS = ("start", "time", "time", "write", "commit")
#: Default maximum number of faults per round, and of those before the stream of the job.
ROUND_FAULTS, EARLY_FAULTS = 5, 1


@dataclass(frozen=True)
class Fault:
    """Fault at a random moment of a phase.

    Attributes:
        phase: Phase in which it happens, one of `PHASES`.
        target: Affected process or resource, a key of `ACTIONS`.
        moment: Event that triggers it, one of `MOMENTS`.
        fraction: Fraction of the usual duration of the phase after which it happens.
        seconds: Duration of a pause, of a full disk or of a partition, in seconds. A partition
            beyond the health check or of the head lasts that much longer than the health check.
    """

    number: int
    phase: str
    target: str
    action: str
    moment: str
    fraction: float
    seconds: float

    @property
    def job(self) -> str:
        """Job that the fault affects."""
        return "index" if self.phase in INDEX_PHASES else self.phase

    @property
    def is_early(self) -> bool:
        """True if it happens before the stream, which a job passes once."""
        return self.phase in INDEX_PHASES[:2] or (self.moment == "start" and self.job != "maintain")

    def __str__(self) -> str:
        return f"{self.action} of {self.target} while {self.phase}"


def plan(
    number: int, seed: int, phases: Sequence[str], without: Collection[str] = ()
) -> list[Fault]:
    """Draws faults. Every target of every phase comes once before any comes again."""
    generator = random.Random(seed)
    pairs = [(p, t) for p in phases for t in TARGETS[p] if t not in without]
    if not pairs:
        raise SpecError("--phases", [*phases], "phases with an available target")
    faults: list[Fault] = []
    while len(faults) < number:
        order = generator.sample(pairs, len(pairs))
        for phase, target in order[: number - len(faults)]:
            weights = ACTIONS[target]
            action = generator.choices(list(weights), list(weights.values()))[0]
            moment = {"writing": "write", "committing": "commit"}.get(phase, "time")
            if phase in OTHER_JOBS:
                moment = generator.choice(MOMENTS)
                if moment == "start" and target in ("encoder", "compressor"):
                    moment = "time"  # the actors do not exist yet
            fraction, seconds = generator.uniform(0.0, 0.8), generator.uniform(0.3, 3.0)
            faults.append(Fault(len(faults), phase, target, action, moment, fraction, seconds))
    return faults


def rounds(faults: Sequence[Fault], seed: int, max_faults: int = ROUND_FAULTS) -> list[list[Fault]]:
    """Divides faults into rounds. All faults of a round affect one job on one index."""
    by_job: dict[str, list[Fault]] = {}
    for fault in faults:
        by_job.setdefault(fault.job, []).append(fault)
    divided: list[list[Fault]] = []
    for waiting in by_job.values():
        while waiting:
            chosen: list[Fault] = []
            for fault in list(waiting):
                num_early = sum(other.is_early for other in chosen)
                has_room = not fault.is_early or num_early < EARLY_FAULTS
                if has_room and len(chosen) < max_faults:
                    chosen.append(fault)
                    waiting.remove(fault)
            divided.append(sorted(chosen, key=lambda fault: (not fault.is_early, fault.number)))
    random.Random(seed).shuffle(divided)
    return divided
