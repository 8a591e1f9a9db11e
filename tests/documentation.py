"""The fenced code blocks of the documentation, and the commands in them.

A block of commands or Python is executed by the tests marked `heavy`, unless an HTML comment on the
line before its fence says what it needs: `<!-- requires: gpu, time -->`. A block that begins with a
comment such as `# my.yaml` or `# my.py` provides the file of this name for the blocks after it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What a block may need, and why it is not executed.
REQUIREMENTS = {
    "cluster": "a Ray cluster",
    "data": "files or an index that the repository does not have",
    "gpu": "a GPU",
    "hub": "a model hub",
    "network": "a package index",
    "packages": "packages that are not installed",
    "server": "a running server",
    "time": "more than a few minutes",
}
FENCE = re.compile(
    r"(?:^<!-- requires: (?P<requires>[a-z, ]+) -->\n)?"
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\S*).*\n(?P<text>(?:.*\n)*?)^ *(?P=fence)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        path: The file that has it.
        line: The line of its fence, from 1.
        language: The word behind the fence, such as `bash`.
        requires: Names in `REQUIREMENTS`.
    """

    path: Path
    line: int
    language: str
    text: str
    requires: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """Name of the file that a block of YAML or Python provides."""
        found = re.match(r"# ([\w-]+\.(?:yaml|py))\b", self.text)
        return found[1] if found and self.language in ("yaml", "python") else None


def pages() -> list[Path]:
    """Returns the Markdown files that are documentation."""
    folders = ("docs", "jobs", "cluster", "examples")
    below = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.md")]
    return sorted([*ROOT.glob("*.md"), *below])


def blocks(path: Path) -> list[Block]:
    """Returns the fenced blocks of a file, in order."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        requires = tuple(name.strip() for name in (match["requires"] or "").split(",") if name)
        line = text.count("\n", 0, match.start("fence")) + 1
        found.append(Block(path, line, match["language"], match["text"], requires))
    return found


def commands(text: str) -> Iterator[list[str]]:
    r"""Yields the words of each command of a shell script.

    >>> list(commands("A=1 make demo && cat a \\\n  b > c   # prints\nfor i in 1 2; do ls; done"))
    [['make', 'demo'], ['cat', 'a', 'b'], ['ls']]

    The value of a variable is 0.

    >>> list(commands("echo a/$s/b"))
    [['echo', 'a/0/b']]
    """
    text = re.sub(r"(^|\s)#\s.*", r"\1", text.replace("\\\n", " "))
    text = re.sub(r"\$\w+", "0", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    redirected = False
    for word in [*lexer, "\n"]:
        if set(word) <= set(";&|\n"):
            while words and (re.match(r"\w+=", words[0]) or words[0] in ("do", "done")):
                words.pop(0)
            if words and words[0] != "for":
                yield words
            words = []
        elif set(word) <= set("<>"):
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(word)


def inline_commands(path: Path) -> Iterator[list[str]]:
    """Yields the words of the jobs with arguments in the prose of a page."""
    prose = re.sub(r"^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for code in re.findall(r"`([^`]*\bmaxray\s[^`]*)`", prose):
        for words in commands(code.replace("\n", " ")):
            is_name = all(re.fullmatch("[a-z]+", word) for word in words)  # such as `maxray demo`
            if words[0] == "maxray" and not is_name and words[1] != "VERB":
                yield words
