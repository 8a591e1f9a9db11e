"""Counts and rates of an index job."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.index.fragments import Pending


@dataclass
class Counts:
    """Counts and rates of a running job.

    Attributes:
        listed: Items that the source lists.
        unchanged: Items that are already indexed with the same revision.
        rejected_before: Items that an earlier run rejected and this run does not retry.
        to_do: Items that this run processes.
        new: Items indexed for the first time.
        replaced: Items whose older revision was replaced.
        rejected: Items rejected by this run.
        gone: Items that were deleted from the source between listing and reading.
        missing: Indexed items that the source no longer lists.
        removed: Rows removed because the source no longer lists them.
        truncated: Indexed files that are shorter than their header states.
        bytes: Size of the written rows.
        seconds: Time by stage, summed over actors.
        phases: Time by phase of the job, in seconds.
        started: Start of the job, in seconds since 1970, as are the following times.
        stream_started: Start of encoding.
        first_written: Arrival of the first written fragment at the driver.
        first_commit: First commit.
        last_commit: Last commit so far.
    """

    listed: int = 0
    unchanged: int = 0
    rejected_before: int = 0
    to_do: int = 0
    new: int = 0
    replaced: int = 0
    rejected: int = 0
    gone: int = 0
    missing: int = 0
    removed: int = 0
    truncated: int = 0
    commits: int = 0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    stream_started: float | None = None
    first_written: float | None = None
    first_commit: float | None = None
    last_commit: float | None = None

    @property
    def indexed(self) -> int:
        """Number of listed items whose current revision is in the index."""
        return self.unchanged + self.new + self.replaced

    @property
    def done(self) -> int:
        """Number of items that this run has processed."""
        return self.new + self.replaced + self.rejected + self.gone

    def add_commit(self, pending: Pending) -> None:
        """Adds the counts of a commit."""
        self.new += pending.num_items - pending.num_replaced
        self.replaced += pending.num_replaced
        self.rejected += sum(table.num_rows for table in pending.rejects)
        self.gone += pending.gone
        self.bytes += pending.num_bytes
        self.commits += 1
        for name, spent in pending.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self.last_commit = time.time()
        self.first_commit = self.first_commit or self.last_commit

    def rates(self) -> dict[str, float]:
        """Computes the throughput of each stage in items per second per actor."""
        done = self.new + self.replaced
        return {name: done / spent for name, spent in self.seconds.items() if spent > 0}

    def summary(self) -> dict[str, Any]:
        """Returns all counts, times and rates, which are recorded in the summary of the job."""
        return {**vars(self), "indexed": self.indexed, "rates": self.rates()}

    def line(self, elapsed: float) -> str:
        """Formats the progress line after `elapsed` seconds."""
        rate = (self.new + self.replaced) / elapsed
        left = f"{(self.to_do - self.done) / rate:,.0f} s left" if rate else "no items written yet"
        share = 100 * self.done / self.to_do if self.to_do else 100.0
        rates = "  ".join(f"{name} {r:,.0f}/s" for name, r in self.rates().items())
        return (
            f"{self.done:,}/{self.to_do:,} items ({share:.0f}%)  {rate:,.1f}/s  [{rates}]  "
            f"rejects {self.rejected:,}  commits {self.commits}  {left}"
        )
