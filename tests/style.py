"""Checks of the writing style of docs/style.md: `python -m tests.style` lists the violations."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MAX_COLUMNS = 100

#: Files that quote the words they ban.
EXEMPT = {"docs/style.md", "tests/style.py", "tests/test_style.py", "CODE_OF_CONDUCT.md"}

#: Words that prose and messages avoid, and what to write instead.
WORDS = {
    r"\b(il)?legal\b": "valid, allowed or must be",
    r"\bpictures?\b": "image",
    r"\bis no\b(?! (such|longer)\b)": "is not a",
    r"\bof which\b": "a main clause",
    r"\bso many\b": "at most N, or that many",
    r"\banew\b": "again",
    r"\bgoes on\b": "resumes or continues",
    r"\btold\b": "reported, returned or passed",
    r"\bkept states\b": "cached hidden states",
    r"\blate scores?\b": "MaxSim score",
    r"\bstands? (in|at|for|under|beside)\b": "is in, or represents",
    r"\b(tokens|bytes|vectors|items|units|rows|files) an? "
    r"(item|page|scene|query|unit|shard|GPU|image|document)\b": "per ...",
    r"\b(behavior|color|center|neighbor|modeling)(s|ed|ing)?\b": "the British spelling",
    r"\b(initial|normal|optim|organ|quant|recogn|summar|visual)iz(e|ed|es|er|ing|ation)\b": "-ise",
}
BANNED = {re.compile(pattern, re.IGNORECASE): advice for pattern, advice in WORDS.items()}
FIRST_WORD = re.compile(r"(What|Whether|Which|How|Of|Where|As|Those|So)\b")
VARIABLES = {"own", "there", "how", "said", "about", "told", "every", "kept", "drawn"}
#: Code, links and values that other software defines.
CODE = re.compile(
    r"outside lower center|prefers-color-scheme|``[^`]*``|`[^`]*`|\]\([^)]*\)|<[^>]*>|https?://\S+"
)


class Violation(NamedTuple):
    """A line that violates the style guide."""

    line: int
    problem: str


def banned_words(text: str, line: int) -> Iterator[Violation]:
    """Yields the banned words of a text that begins at `line`; inline code is ignored."""
    for offset, part in enumerate(text.splitlines()):
        prose = CODE.sub("", part)
        for pattern, advice in BANNED.items():
            if found := pattern.search(prose):
                yield Violation(line + offset, f"{found[0]!r}: write {advice}")


def check_markdown(text: str) -> Iterator[Violation]:
    """Yields the violations of a Markdown file: banned words outside code, and long lines."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield from banned_words(line, number)
        if len(line) > MAX_COLUMNS and not line.startswith("|") and " " in line.strip():
            yield Violation(number, f"{len(line)} columns: wrap at {MAX_COLUMNS}")


def check_python(text: str) -> Iterator[Violation]:
    """Yields the violations of a Python file in docstrings, strings, comments and names."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and (found := FIRST_WORD.match(docstring)):
                line = node.body[0].lineno
                yield Violation(line, f"docstring begins with {found[0]}: a verb or noun phrase")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in VARIABLES:
                yield Violation(node.lineno, f"variable {node.id}: a noun that names the value")
        elif isinstance(node, ast.arg) and node.arg in VARIABLES:
            yield Violation(node.lineno, f"parameter {node.arg}: a noun that names the value")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from banned_words(node.value, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from banned_words(token.string, token.start[0])


def check_yaml(text: str) -> Iterator[Violation]:
    """Yields the violations in the comments of a YAML file."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.search(r"(^|\s)#(.*)", line):
            yield from banned_words(found[2], number)


CHECKS = {".md": check_markdown, ".py": check_python, ".yaml": check_yaml}


def files() -> list[str]:
    """Returns the tracked files that have a check."""
    names = subprocess.run(
        ["git", "ls-files", *(f"*{suffix}" for suffix in CHECKS)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [name for name in names if name not in EXEMPT]


def main() -> int:
    """Prints the violations of all tracked files, or of those named; 1 if there are any."""
    count = 0
    for name in sys.argv[1:] or files():
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        for violation in sorted(CHECKS[path.suffix](path.read_text(encoding="utf-8"))):
            print(f"{name}:{violation.line}: {violation.problem}")
            count += 1
    if count:
        print(f"{count} violations of docs/style.md", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
