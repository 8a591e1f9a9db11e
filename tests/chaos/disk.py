"""Disk of the indexes under test, which can be filled."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.chaos.processes import Process

#: Size of the disk, in bytes.
DISK_BYTES = 256 << 20


class Disk:
    """File system in memory that is mounted on a folder, or a folder if mounting is not permitted.

    Without the permission, a full disk is simulated by a limit on the size of files
    (`RLIMIT_FSIZE`) of the processes that write.

    Args:
        folder: Folder of the indexes. Its contents are removed.
    """

    def __init__(self, folder: Path):
        self.folder, self._ballast = folder, folder / "ballast"
        self._limited: list[tuple[Process, tuple[int, int]]] = []
        self._unmount()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(folder)]
        try:
            self.is_mounted = subprocess.run(command, capture_output=True).returncode == 0
        except FileNotFoundError:
            self.is_mounted = False

    @property
    def description(self) -> str:
        """Mechanism that simulates a full disk, for the report."""
        return "tmpfs" if self.is_mounted else "RLIMIT_FSIZE"

    def fill(self, writers: Iterable[Process]) -> None:
        """Fills the disk, or else limits the processes that write."""
        if not self.is_mounted:
            for writer in writers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    limits = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
                    self._limited.append((writer, limits))
                    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
            return
        with self._ballast.open("wb") as file:
            chunk = os.statvfs(self.folder).f_frsize
            size = 0
            while True:
                free = os.statvfs(self.folder).f_bavail * chunk
                try:
                    os.posix_fallocate(file.fileno(), size, max(free, chunk))
                except OSError:
                    if free <= chunk:
                        return
                    continue  # others have written in the meantime
                size += free

    def free(self) -> None:
        """Frees the space again."""
        self._ballast.unlink(missing_ok=True)
        for writer, limits in self._limited:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, limits)
        self._limited = []

    def close(self) -> None:
        """Removes the disk and its contents."""
        self._unmount()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unmount(self) -> None:
        if os.path.ismount(self.folder):
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
