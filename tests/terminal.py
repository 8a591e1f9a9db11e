"""Processes on a pseudo-terminal, and the text that the terminal shows."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

#: Incomplete control sequence at the end of a read.
PARTIAL = re.compile(r"\x1b(\[[\d;?]*)?$")
CONTROL = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")


class Screen:
    """Minimal terminal: text, line breaks, and the control sequences that displays use."""

    def __init__(self, columns: int = 80):
        self.columns = columns
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0
        self.is_cursor_visible = True

    def feed(self, text: str) -> None:
        """Processes output."""
        position = 0
        while position < len(text):
            if match := CONTROL.match(text, position):
                self._control(*match.groups())
                position = match.end()
                continue
            self._put(text[position])
            position += 1

    def _put(self, character: str) -> None:
        if character == "\n":
            self.row += 1
            self._extend()
        elif character == "\r":
            self.column = 0
        else:
            if self.column == self.columns:
                self.row, self.column = self.row + 1, 0
                self._extend()
            line = self.lines[self.row]
            line += [" "] * (self.column + 1 - len(line))
            line[self.column] = character
            self.column += 1

    def _extend(self) -> None:
        while len(self.lines) <= self.row:
            self.lines.append([])

    def _control(self, private: str, arguments: str, command: str) -> None:
        if command == "A":
            self.row = max(0, self.row - int(arguments or 1))
        elif command == "K":
            self.lines[self.row] = [] if arguments == "2" else self.lines[self.row][: self.column]
        elif private and arguments == "25":
            self.is_cursor_visible = command == "h"
        else:
            assert command == "m", (private, arguments, command)

    @property
    def text(self) -> str:
        """Present text of the terminal, with the lines that have been scrolled out."""
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip()


class Terminal:
    """Process on a pseudo-terminal."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], cwd: str, columns: int = 110
    ):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            env={**environment, "TERM": "xterm-256color"},
            cwd=cwd,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.screen = Screen(columns)
        self.frames: list[str] = []
        self._pending, self._decoder = "", codecs.getincrementaldecoder("utf-8")()

    def read(self, until: Callable[[str], bool] | None = None, timeout_s: float = 120) -> str:
        """Reads until the text satisfies a condition, or until the process has ended.

        Every state of the terminal is added to `frames`.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self._pending += self._decoder.decode(os.read(self._master, 1 << 16))
                except OSError:  # the process has closed the terminal
                    return self.screen.text
                complete = PARTIAL.sub("", self._pending)
                self._pending = self._pending[len(complete) :]
                self.screen.feed(complete)
                self.frames.append(self.screen.text)
                if until and until(self.screen.text):
                    return self.screen.text
            elif self.process.poll() is not None:
                return self.screen.text
        raise TimeoutError(self.screen.text)

    def close(self) -> int:
        """Waits for the end of the process and returns its exit code."""
        code = self.process.wait(timeout=60)
        os.close(self._master)
        return code
