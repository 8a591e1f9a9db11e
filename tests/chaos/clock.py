"""Wall clock of a job that can jump, by a library that replaces `clock_gettime`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pipeline.runtime.atomic import write_atomic

SOURCE = Path(__file__).with_suffix(".c")
#: Size of a jump, in seconds: longer than any lease.
JUMP_SECONDS = 7200


def can_jump() -> bool:
    """Returns True if there is a C compiler, which the library needs."""
    return shutil.which("cc") is not None


class Clock:
    """Wall clock of a process, which can jump while the process runs.

    libfaketime (0.9.10) cannot be used: with it, `time.sleep` of Python 3.11 raises an error unless
    the monotonic clock jumps as well.
    """

    def __init__(self, folder: Path):
        self._file, self._library = folder / "clock", folder / "clock.so"
        if not self._library.exists():
            command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)]
            subprocess.run([*command, "-ldl"], check=True)
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Sets the offset from the clock of the machine, in seconds."""
        write_atomic(str(self._file), str(seconds))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that has this clock."""
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file)}
