"""Makes docstrings valid reStructuredText: they are written to be read in a terminal."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

#: Code and roles, which stay as they are.
LITERAL = re.compile(r"(`+[^`]+`+|:\w+:)")
#: Characters that are markup in reStructuredText and ordinary in our docstrings.
MARKUP = re.compile(r"([*|])|(?<=\w)(_)(?!\w)")


def escape(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Escapes markup characters outside of code, doctests and code blocks."""
    text = "\n".join(lines)
    paragraphs = re.split(r"(\n{2,})", text)
    for number, paragraph in enumerate(paragraphs):
        if not paragraph.lstrip().startswith(">>>"):
            parts = LITERAL.split(paragraph)
            parts[::2] = [MARKUP.sub(r"\\\1\2", part) for part in parts[::2]]
            paragraphs[number] = "".join(parts)
    lines[:] = "".join(paragraphs).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the hook before napoleon, which adds markup of its own."""
    app.connect("autodoc-process-docstring", escape, priority=400)
    return {"parallel_read_safe": True}
