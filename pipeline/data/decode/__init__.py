"""Decoding of untrusted files in separate processes.

A file that crashes a decoder, hangs it or exhausts its memory only affects its own result. The
module `process` is the client of a decoding process, and `serve` is its main program. Every other
module reads one file format. These modules import nothing else from this package, so that processes
start quickly.
"""


class Unreadable(Exception):
    """Raised if a file or a part of it cannot be read.

    Args:
        reason: Short reason by which errors can be grouped.
        detail: Description of the problem.
    """

    def __init__(self, reason: str, detail: str = ""):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


def join_surrogates(text: str) -> str:
    r"""Replaces surrogate pairs by their characters and removes halves of pairs (truncated text).

    >>> join_surrogates("a\ud83d b \ud83d\ude00") == "a b \U0001f600"
    True
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore")
