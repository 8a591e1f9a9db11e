"""Makes docstrings valid reStructuredText: they are written to be read in a terminal."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

#: Spans between backticks stay as they are; outside of them, markup characters are literal.
SPAN = re.compile(r"(`+[^`]*`+(?:__?)?|:\w+:)")


def escape(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Escapes `*`, `|` and trailing underscores outside of code."""
    code = False
    for number, line in enumerate(lines):
        code = line.startswith(">>>") or line.lstrip().startswith(">>>") or (code and bool(line))
        if code:
            continue
        parts = SPAN.split(line)
        parts[::2] = [re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
        lines[number] = "".join(parts)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the hook before napoleon, which adds markup of its own."""
    app.connect("autodoc-process-docstring", escape, priority=400)
    return {"parallel_read_safe": True}
