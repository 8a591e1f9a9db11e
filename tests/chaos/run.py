"""Runs the chaos suite: injects faults into jobs, resumes them and checks the results.

A round disturbs one job on one index several times. After each fault the same command is run until
the job commits again or ends, and after the last one until it ends. Then the index is compared with
that of an undisturbed run.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import JobError
from pipeline.index.session import LEASE_VARIABLE
from pipeline.index.status import recent_jobs
from tests.chaos.clock import JUMP_SECONDS, Clock, can_jump
from tests.chaos.cluster import ChaosCluster
from tests.chaos.compare import (
    Contents,
    accounting,
    accounting_of_job,
    contents,
    differences,
    orphaned_leases,
)
from tests.chaos.disk import Disk
from tests.chaos.driver import Driver
from tests.chaos.faults import (
    ACTIONS,
    DEFAULT_TARGETS,
    NODE_TARGETS,
    ROUND_FAULTS,
    TITLES,
    Fault,
    plan,
    rounds,
)
from tests.chaos.processes import Process, segments, unused_segments, wait_until
from tests.chaos.workload import Workload, corpus

#: Lifetime of the lease of the jobs, in seconds.
LEASE_SECONDS = 5.0
#: Time after which Ray declares an unreachable node dead, with `cluster.SETTINGS`, in seconds.
HEALTH_SECONDS = 14.0
#: Time after which a job that neither commits nor ends counts as hanging, in seconds.
HANG_SECONDS = 180.0
#: Time in which Ray may end the processes of jobs and nodes that have ended, in seconds.
LEAK_SECONDS = 60.0
#: Number of times that a job is run after a fault before it counts as not resumable.
MAX_RUNS = 6
#: Number of times that a fault is planned whose moment has not come.
MAX_ATTEMPTS = 6
#: Phase of the stream of each job, as it reports it.
STREAMS = {"index": "index", "maintain": "compact"}
#: Phases of the index job before it fits.
LISTING = ("index ids", "list", "mark duplicates", "record rejects")
#: Phases in which a job does not hold the lease yet.
STARTING = ("", "load modules", "start Ray")


@dataclass
class Outcome:
    """Fault that was injected, and what followed.

    Attributes:
        observed: Phase that the job reported at the moment of the fault, and its busy processes.
        seconds: Time from the fault to the next commit of the job, or to its end.
        exits: Exit codes of the runs that the fault ended.
        problems: Sentences about what should not have happened.
    """

    fault: Fault
    observed: str
    seconds: float = 0.0
    exits: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Round:
    """Faults of one job, and the check of its index.

    Attributes:
        missed: Faults whose moment did not come before the job ended.
        problems: Other sentences about the index, leases, processes and memory.
    """

    job: str
    outcomes: list[Outcome] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Converts the round to JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Round:
        """Restores the result of `to_dict`."""
        outcomes = [Outcome(**{**o, "fault": Fault(**o["fault"])}) for o in values["outcomes"]]
        missed = [Fault(**fault) for fault in values["missed"]]
        return cls(**{**values, "outcomes": outcomes, "missed": missed})


def run(
    folder: Path,
    number: int,
    seed: int,
    phases: Sequence[str],
    targets: Sequence[str],
    num_nodes: int,
    report: Callable[[str], None],
) -> list[Round]:
    """Runs the suite.

    Args:
        folder: Folder of the suite. Finished rounds of an earlier run with the same arguments are
            not repeated.
        phases: Phases to disturb, see `faults.PHASES`.
        targets: Processes and resources to disturb, see `faults.ACTIONS`.
        report: Called with a sentence per fault and per round.

    Raises:
        JobError: A job fails without a fault, or the network cannot be disturbed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    without = {target for target in ACTIONS if target not in targets}
    without.update(() if num_nodes else NODE_TARGETS)
    if "clock" in targets and not can_jump():
        without.add("clock")
        report("no clock jumps: a C compiler is missing")
    faults = plan(number, seed, phases, without)
    names = [*phases, *(() if tuple(targets) == DEFAULT_TARGETS else targets)]
    record = Record(folder / f"rounds-{number}-{seed}-{num_nodes}-{'-'.join(names)}.jsonl")
    before = segments()
    suite = Suite(folder, num_nodes, "network" not in without, report)
    try:
        for attempt in range(MAX_ATTEMPTS):
            todo = [fault for fault in faults if fault.number not in record.numbers]
            # Of faults whose moment did not come before the job ended, fewer share the next
            # round, and each comes earlier.
            todo = [replace(f, fraction=f.fraction * 0.5**attempt) for f in todo]
            for chosen in rounds(todo, seed + attempt, max(1, ROUND_FAULTS - 2 * attempt)):
                finished = suite.round(chosen)
                record.add(finished)
                report(describe(finished, len(record.numbers), number))
    finally:
        suite.close()
    wait_until(lambda: not unused_segments(segments() - before), 10, 1.0)
    if left := unused_segments(segments() - before):
        record.add(Round("cluster", problems=[f"shared memory remains: {', '.join(left)}"]))
    return record.rounds


def describe(finished: Round, number: int, total: int) -> str:
    """Describes a round in one line."""
    verdict = "identical" if not (finished.lost or finished.duplicated) else "DIFFERENT"
    problems = [p for o in finished.outcomes for p in o.problems] + finished.problems
    found = f"; PROBLEMS: {'; '.join(problems)}" if problems else ""
    return (
        f"{number}/{total} faults  {finished.job}: {len(finished.outcomes)} faults,"
        f" {len(finished.missed)} missed, {finished.seconds:.0f} s, lost {len(finished.lost)},"
        f" duplicated {len(finished.duplicated)}, {verdict}{found}"
    )


class Record:
    """File with the finished rounds, one JSON object per line."""

    def __init__(self, path: Path):
        self._path = path
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self.rounds = [Round.from_dict(json.loads(line)) for line in lines]

    @property
    def numbers(self) -> set[int]:
        """Numbers of the faults that were injected."""
        return {outcome.fault.number for r in self.rounds for outcome in r.outcomes}

    def add(self, finished: Round) -> None:
        """Appends a round."""
        self.rounds.append(finished)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finished.to_dict()) + "\n")


class Suite:
    """Cluster, disk and jobs of the suite."""

    def __init__(
        self, folder: Path, num_nodes: int, has_network: bool, report: Callable[[str], None]
    ):
        self.report = report
        self.workload = Workload(folder)
        self.workload.write()
        self._log = folder / "errors.log"
        self._expected: dict[str, tuple[Contents, dict[str, float]]] = {}
        self.disk = Disk(folder / "disk")
        report(f"a full disk is simulated by {self.disk.description}")
        self._has_network = has_network
        try:
            self.cluster = ChaosCluster(num_nodes, has_network)
        except BaseException:
            self.disk.close()
            raise

    def close(self) -> None:
        """Stops the cluster and removes the indexes."""
        self.cluster.close()
        self.disk.close()

    def start(self, job: str, index: Path, clock: Clock | None = None) -> Driver:
        """Starts a job, or resumes it."""
        environment = {
            "RAY_ADDRESS": self.cluster.address,
            LEASE_VARIABLE: str(LEASE_SECONDS),
            **(clock.environment if clock else {}),
        }
        return Driver(self.workload.command(job, index), index, self._log, environment)

    def expected(self, job: str) -> tuple[Contents, dict[str, float]]:
        """Returns the undisturbed result of a job and the durations of its phases."""
        if job not in self._expected:
            if job != "index":
                self.expected("index")
            self._expected[job] = self.workload.expected(job, self._run_undisturbed)
        return self._expected[job]

    def _run_undisturbed(self, job: str, index: Path) -> dict[str, float]:
        driver = self.start(job, index)
        written = 0.0
        before = driver.changed("data")
        while driver.exit_code is None:
            if not written and driver.changed("data") != before:
                written = time.time()
            time.sleep(0.01)
        if driver.wait(0) != 0:
            raise JobError(f"jobs.{job} failed without a fault: {driver.error()}")
        starts = [*driver.phases.items(), ("", time.time())]
        pairs = itertools.pairwise(starts)
        seconds = {name: end - start for (name, start), (_, end) in pairs}
        stream = STREAMS.get(job, job)
        seconds["stream"] = driver.phases[stream] + seconds[stream] - written
        self.report(f"undisturbed {job}: {', '.join(f'{n} {s:.1f} s' for n, s in seconds.items())}")
        return seconds

    def round(self, faults: Sequence[Fault]) -> Round:
        """Injects faults into one job, one after another, and checks the index at the end."""
        job, start = faults[0].job, time.monotonic()
        self.expected(job)
        index = self.disk.folder / job
        self.workload.prepare(job, index)
        finished = Round(job)
        victim = Victim(self, job, index, any(fault.target == "clock" for fault in faults))
        try:
            for number, fault in enumerate(faults):
                outcome = victim.disturb(fault, len(faults) - number)
                if outcome is None:
                    finished.missed.append(fault)
                    continue
                finished.outcomes.append(outcome)
                what = f"#{fault.number} {fault}: recovered after {outcome.seconds:.1f} s"
                self.report(f"{what} [{outcome.observed}] {'; '.join(outcome.problems)}".rstrip())
            finished.problems += victim.finish()
            self._check(finished, index)
        finally:
            victim.driver.kill()
            self.disk.free()
            self.cluster.repair()
        finished.seconds = time.monotonic() - start
        return finished

    def _check(self, finished: Round, index: Path) -> None:
        """Compares the index with the undisturbed one and looks for what remains of the jobs."""
        found = differences(contents(str(index)), self.expected(finished.job)[0])
        counted = accounting(str(index), corpus())
        finished.lost = sorted({*found.lost, *counted.lost})
        finished.duplicated = sorted({*found.duplicated, *counted.duplicated})
        found.lost = found.duplicated = []
        finished.problems += found.sentences()
        (summary,) = recent_jobs(str(index), 1, None)
        finished.problems += accounting_of_job(summary) + orphaned_leases(str(index))
        leaked = self.cluster.leaked(LEAK_SECONDS)
        finished.problems += [f"the process {title} remains" for title in leaked]
        if self._has_network:
            left = self.cluster.unregistered(LEAK_SECONDS)
            finished.problems += [f"the dead node {address} runs" for address in left]


class Victim:
    """Job that is disturbed and resumed."""

    def __init__(self, suite: Suite, job: str, index: Path, has_clock: bool):
        self._suite, self._job, self._index = suite, job, index
        self._usual = suite.expected(job)[1]
        self._clock = Clock(suite.disk.folder.parent) if has_clock else None
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._partitioned: list[Process] = []
        self._before: set[Process] = set()
        self.driver = suite.start(job, index, self._clock)

    # -- the moment --------------------------------------------------------------------------

    def disturb(self, fault: Fault, num_left: int) -> Outcome | None:
        """Waits for the moment of a fault, injects it, and waits until the job has recovered.

        Returns:
            The outcome, or None if the job ended before.
        """
        if not self._await(fault, num_left):
            return None
        targets = self._targets(fault)
        if not targets and fault.target in TITLES:
            return None
        busy = [p.title for p in self._suite.cluster.tasks() if p.title.endswith(".submit")]
        observed = f"{self.driver.phase}; busy: {', '.join(busy) or 'none'}"
        self._before = self._suite.cluster.tasks_like(fault.target)
        commits = self.driver.last_commit()[0]
        start = time.time()
        self._inject(fault, targets)
        if fault.moment == "commit" and fault.action == "kill" and fault.target == "driver":
            self.driver.wait(5)
            inside = self.driver.is_inside_commit()
            observed += "; between transaction and version" if inside else "; after a version"
        outcome = Outcome(fault, observed)
        self._recover(outcome, start, commits)
        return outcome

    def _await(self, fault: Fault, num_left: int) -> bool:
        """Waits for the moment of a fault. Returns False if the job ends before."""
        if fault.is_early:
            if fault.phase == "listing":
                names: tuple[str, ...] = LISTING
            else:
                names = tuple(name for name in self._usual if name.startswith("fit "))
            if fault.phase == "listing" or names:
                has_begun = lambda: self.driver.phase in names  # noqa: E731
            else:
                has_begun = lambda: self.driver.phase not in STARTING  # noqa: E731
            if not self._wait(has_begun):
                return False
            delay = fault.fraction * sum(self._usual.get(name, 0.0) for name in names)
            time.sleep(min(delay, 10.0))
            return self.driver.exit_code is None and has_begun()
        stream = STREAMS.get(self._job, self._job)
        if not self._wait(lambda: self.driver.phase == stream and self._is_streaming()):
            return False
        delay = fault.fraction * self._usual["stream"] / num_left
        self._wait(lambda: False, delay)
        if fault.moment in ("write", "commit"):
            folder = "data" if fault.moment == "write" else "_transactions"
            before = self.driver.changed(folder)
            if not self._wait(lambda: self.driver.changed(folder) != before, interval=0.001):
                return False
        return self.driver.exit_code is None and self.driver.phase == stream

    def _is_streaming(self) -> bool:
        """Returns True if the actors of the stream have loaded their models."""
        if self._job == "maintain":
            return True
        cluster = self._suite.cluster
        return bool(cluster.tasks_like("encoder") or cluster.tasks_like("compressor"))

    def _wait(
        self, condition: Callable[[], bool], seconds: float = HANG_SECONDS, interval: float = 0.02
    ) -> bool:
        """Waits for a condition. Returns False if the job ends before, or after `seconds`."""
        has_ended = lambda: self.driver.exit_code is not None  # noqa: E731
        met: list[bool] = []

        def check() -> bool:
            self._replace_partitioned()
            if condition():
                met.append(True)
            return bool(met) or has_ended()

        wait_until(check, seconds, interval)
        return bool(met)

    # -- the fault ---------------------------------------------------------------------------

    def _targets(self, fault: Fault) -> list[Process]:
        cluster, generator = self._suite.cluster, random.Random(fault.number)
        if fault.target in TITLES:
            found = sorted(cluster.tasks_like(fault.target), key=lambda task: task.pid)
            return [generator.choice(found)] if found else []
        if fault.target == "driver":
            return [self.driver.process]
        if fault.target == "gcs":
            return [cluster.gcs]
        if fault.target in NODE_TARGETS:
            workers = sorted(cluster.workers, key=lambda worker: worker.pid)
            # A node that works, if there is one.
            busy = [w for w in workers if any(cluster.tasks_of(w))]
            return [generator.choice(busy or workers)]
        return []

    def _inject(self, fault: Fault, targets: Sequence[Process]) -> None:
        cluster, now = self._suite.cluster, time.monotonic()
        if fault.action == "full disk":
            self._suite.disk.fill([self.driver.process, *cluster.tasks()])
            self._undo.append((now + fault.seconds, self._suite.disk.free))
        elif fault.target == "clock":
            assert self._clock is not None
            self._clock.jump(JUMP_SECONDS if fault.action == "jump forward" else -JUMP_SECONDS)
            if fault.fraction < 0.4:  # the next run finds a lease with a wrong time
                self._undo.append((now + 1.5, lambda: _send(self.driver.process, signal.SIGKILL)))
        elif fault.target == "network":
            self._partition(fault, targets[0])
        elif fault.target == "head":
            cluster.kill_head()
            self.driver.process.send(signal.SIGKILL)
        elif fault.target == "node":
            cluster.kill_node(targets[0])
            self._undo.append((now + fault.seconds, lambda: _ignore(cluster.repair())))
        elif fault.target == "raylet" and fault.action == "kill":
            cluster.kill_raylet(targets[0])
            self._undo.append((now + fault.seconds, lambda: _ignore(cluster.repair())))
        elif fault.action == "kill":
            targets[0].send(signal.SIGKILL)
            if fault.target == "gcs":
                self._undo.append((now + fault.seconds, lambda: _ignore(cluster.repair())))
        else:
            targets[0].send(signal.SIGSTOP)
            if fault.action == "pause":
                resume = lambda: _send(targets[0], signal.SIGCONT)  # noqa: E731
                self._undo.append((now + fault.seconds, resume))

    def _partition(self, fault: Fault, worker: Process) -> None:
        """Takes the link of a node down for a while.

        Nodes that were declared dead run until they learn it; then others replace them.
        """
        cluster = self._suite.cluster
        is_head = fault.action == "partition of the head"
        node = cluster.head if is_head else worker
        seconds = fault.seconds + (0 if fault.action == "partition" else HEALTH_SECONDS)
        cluster.disconnect(node)
        self._undo.append((time.monotonic() + seconds, lambda: cluster.connect(node)))
        self._partitioned += cluster.workers if is_head else [node]

    def _replace_partitioned(self) -> None:
        """Replaces the nodes that have ended after a partition, when all links are up."""
        if not self._undo and not all(raylet.is_alive for raylet in self._partitioned):
            self._partitioned = [raylet for raylet in self._partitioned if raylet.is_alive]
            self._suite.cluster.repair()

    # -- the recovery ------------------------------------------------------------------------

    def _recover(self, outcome: Outcome, start: float, commits: int) -> None:
        """Resumes the job until it commits or ends, and records how long it took."""
        if outcome.fault.action == "pause beyond the lease":
            self._supersede(outcome, start)
            return
        deadline = time.monotonic() + HANG_SECONDS
        run, fault = self.driver, outcome.fault
        while True:
            self._replace_partitioned()
            is_over = not self._undo and (self.driver is not run or self._is_replaced(fault))
            if not is_over:  # work that was finished before may be committed
                self._undo_due()
                commits = self.driver.last_commit()[0]
            done, when = self.driver.last_commit()
            if is_over and done > (commits if self.driver is run else 0):
                outcome.seconds = max(0.0, when - start)
                break
            if (code := self.driver.exit_code) is not None:
                outcome.exits.append(code)
                if code == 0:
                    outcome.seconds = time.time() - start
                    self._undo_due(everything=True)
                    break
                self._judge_exit(code, outcome)
                if len(outcome.exits) > MAX_RUNS:
                    outcome.problems.append(f"still fails after {MAX_RUNS} runs")
                    break
                self._resume()
            if time.monotonic() > deadline:
                outcome.problems.append(f"hangs for {HANG_SECONDS:.0f} s in {self.driver.phase}")
                self.driver.abort()
                self._resume()
                deadline = time.monotonic() + HANG_SECONDS
            time.sleep(0.02)

    def _is_replaced(self, fault: Fault) -> bool:
        """Returns True unless the run or a worker was killed and nothing works in its place."""
        if fault.action == "kill" and fault.target in ("driver", "head"):
            return False  # another run replaces it
        if fault.action != "kill" or fault.target not in TITLES:
            return True
        return bool(self._suite.cluster.tasks_like(fault.target) - self._before)

    def _supersede(self, outcome: Outcome, start: float) -> None:
        """Starts a second run beside the paused one when its lease expires, then resumes that."""
        paused = self.driver
        time.sleep(LEASE_SECONDS + 0.5)
        rest = replace(outcome.fault, action="pause")
        self.driver = self._suite.start(self._job, self._index, self._clock)
        following = Outcome(rest, "")
        self._recover(following, start, 0)
        outcome.seconds, outcome.exits = following.seconds, following.exits
        outcome.problems += following.problems
        paused.process.send(signal.SIGCONT)
        code = paused.wait(HANG_SECONDS)
        if code is None:
            outcome.problems.append("the superseded run does not end")
            paused.abort()
        elif code not in (0, 1) or (code == 1 and "lease" not in paused.error()):
            outcome.problems.append(f"the superseded run ended with {code}: {_last(paused)}")

    def _judge_exit(self, code: int, outcome: Outcome) -> None:
        """Records an exit with another error than that of a stopped or disturbed job.

        Errors of a full disk in a Ray task have a traceback, which names the file.
        """
        has_traceback = code == 1 and "Traceback (most recent call last)" in self.driver.error()
        if code == 2 or (has_traceback and outcome.fault.target != "disk"):
            outcome.problems.append(f"exit code {code}: {_last(self.driver)}")

    def _resume(self) -> None:
        self._undo_due(everything=True)
        self._suite.cluster.repair()
        if self._clock is not None:
            self._clock.jump(0)
        self.driver = self._suite.start(self._job, self._index, self._clock)

    def _undo_due(self, everything: bool = False) -> None:
        """Ends the faults whose time is over, or all of them."""
        due = [undo for undo in self._undo if everything or undo[0] <= time.monotonic()]
        self._undo = [undo for undo in self._undo if undo not in due]
        for _, undo in due:
            undo()

    def finish(self) -> list[str]:
        """Resumes the job until it ends. Returns sentences about what should not happen."""
        self._undo_due(everything=True)
        for _ in range(MAX_RUNS):
            self._wait(lambda: False)
            code = self.driver.wait(0)
            if code == 0:
                return []
            if code is None:
                phase = self.driver.phase
                self.driver.abort()
                return [f"does not end in {HANG_SECONDS:.0f} s, in phase {phase}"]
            self._resume()
        return [f"ends with {code}: {_last(self.driver)}"]


def _send(target: Process, number: signal.Signals) -> None:
    target.send(number)


def _ignore(value: object) -> None:
    """Discards the result of a call."""


def _last(driver: Driver) -> str:
    return (driver.error().strip().splitlines() or [""])[-1][:300]
