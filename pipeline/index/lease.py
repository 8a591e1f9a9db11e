"""Who may write to an index: a config entry of its dataset, and when it may be taken."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass

from lance import LanceDataset

#: The entry of the dataset's config.
LEASE_KEY = "maxray.lease"


@dataclass(frozen=True)
class Lease:
    """Who may write, and until when (seconds since 1970). An empty `owner` means nobody."""

    owner: str
    epoch: int
    expires: float
    job: str
    host: str
    pid: int
    process_start: str  # tells a process from a later one with the same pid

    def describe(self) -> str:
        """The holder in words."""
        until = time.strftime("%H:%M:%S", time.localtime(self.expires))
        return f"job {self.job} (process {self.pid} on {self.host}, lease until {until})"

    def is_free(self, now: float) -> bool:
        """Whether it may be taken: given back, expired, or its holder died on this machine."""
        if not self.owner or self.expires < now:
            return True
        return self.host == _host() and _process_start(self.pid) != self.process_start

    @classmethod
    def for_this_process(cls, owner: str, epoch: int, expires: float, job: str) -> Lease:
        """A lease that this process holds."""
        pid = os.getpid()
        return cls(owner, epoch, expires, job, _host(), pid, _process_start(pid))

    def entry(self) -> dict[str, str | None]:
        """The lease as an entry of the dataset's config."""
        return {LEASE_KEY: json.dumps(asdict(self))}

    @classmethod
    def of(cls, dataset: LanceDataset) -> Lease | None:
        """The last lease that the dataset's config names."""
        text = dataset.config().get(LEASE_KEY)
        return cls(**json.loads(text)) if text else None


def _host() -> str:
    # With the kernel's boot id and the namespace of process ids: hosts and containers may share a
    # name, and a reboot ends every process.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return f"{socket.gethostname()}/{file.read(8)}-{namespace:x}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str:
    """When a process of this machine started, in the kernel's ticks; "" if it runs no more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]  # a dead process that nobody has waited for
