"""Decoding of untrusted files in separate processes.

A file that crashes, hangs or exhausts the memory of a decoder affects only its own result.
`process` is the client and `serve` the process. All other modules read one file format each; they
import nothing else of this package, so that processes start quickly.
"""


class Unreadable(Exception):
    """A file, or a part of it, cannot be read.

    Args:
        reason: Short reason, suitable for grouping.
        detail: Description of the problem.
    """

    def __init__(self, reason: str, detail: str = ""):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")
