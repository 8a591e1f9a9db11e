"""Files read in processes of their own: what crashes, hangs or swells there is one file.

`process` is the side that asks, `serve` the process; each module beside them reads one kind of
file. They import nothing else of this package: a process starts quickly.
"""


class Unreadable(Exception):
    """A file or a part of it cannot be read: a short reason, good for grouping, and a detail."""

    def __init__(self, reason: str, detail: str = ""):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")
