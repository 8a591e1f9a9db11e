"""Lease for writing to an index.

Renewals write a small file: a commit would rewrite the list of fragments of the index.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace

from lance import LanceDataset

from pipeline.paths import locate
from pipeline.runtime.atomic import write_atomic

#: Key of the config entry.
LEASE_KEY = "maxray.lease"


@dataclass(frozen=True)
class Lease:
    """Exclusive right of a process to write to an index. It expires unless it is renewed.

    Attributes:
        owner: Unique id of the holder, or empty if the lease was released.
        epoch: Number of times that the lease was taken.
        expires: Expiry, in seconds since 1970.
        process_start: Start of the process, which distinguishes it from later ones with its pid.
    """

    owner: str
    epoch: int
    expires: float
    job: str
    host: str
    pid: int
    process_start: str

    def describe(self) -> str:
        """Describes the holder in messages."""
        until = time.strftime("%H:%M:%S", time.localtime(self.expires))
        return f"job {self.job} (process {self.pid} on {self.host}, lease until {until})"

    def is_free(self, now: float) -> bool:
        """Returns True if it was released or has expired, or its holder died on this machine."""
        if not self.owner or self.expires < now:
            return True
        return self.host == _host() and _process_start(self.pid) != self.process_start

    @classmethod
    def for_this_process(cls, owner: str, epoch: int, expires: float, job: str) -> Lease:
        """Returns a lease that this process holds."""
        pid = os.getpid()
        return cls(owner, epoch, expires, job, _host(), pid, _process_start(pid))

    def entry(self) -> dict[str, str | None]:
        """Converts the lease to a config entry of the dataset."""
        return {LEASE_KEY: json.dumps(asdict(self))}

    @classmethod
    def from_dataset(cls, dataset: LanceDataset) -> Lease | None:
        """Reads the last lease from the config of the dataset, or None if it was never taken."""
        text = dataset.config().get(LEASE_KEY)
        return cls(**json.loads(text)) if text else None

    def renewed(self, folder: str) -> Lease:
        """Returns the lease with the expiry of its last renewal, stored in `folder`."""
        return replace(self, expires=max(self.expires, LeaseFile(folder, self.owner).read()))


class LeaseFile:
    """File with the expiry of a lease.

    Only the holder writes it. The next holder removes it, which tells a holder that was suspended
    that it has lost the lease.
    """

    def __init__(self, folder: str, owner: str):
        self._uri = f"{folder}/{owner}.json"

    def exists(self) -> bool:
        """Checks whether the file exists."""
        storage, path = locate(self._uri)
        return storage.exists(path)

    def read(self) -> float:
        """Returns the expiry in seconds since 1970, or 0 if the file does not exist."""
        storage, path = locate(self._uri)
        try:
            return float(json.loads(storage.cat_file(path))["expires"])
        except FileNotFoundError:
            return 0.0

    def write(self, expires: float) -> None:
        """Replaces the expiry."""
        write_atomic(self._uri, json.dumps({"expires": expires}))

    def remove(self) -> None:
        """Removes the file if it exists."""
        storage, path = locate(self._uri)
        if storage.exists(path):
            storage.rm_file(path)


def _host() -> str:
    # The boot id and the pid namespace distinguish reboots, and hosts or containers that share a
    # name.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return f"{socket.gethostname()}/{file.read(8)}-{namespace:x}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str:
    """Returns the start time in clock ticks, or "" if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]  # zombies and dead processes
