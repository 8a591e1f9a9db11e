"""The directive `cli-reference`: every command, from its argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs.extensions.parsers import commands, parser


def _name(action: argparse.Action) -> str:
    """Returns an option with its value, as code."""
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if isinstance(value, tuple):
        value = " ".join(value)
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return names if action.nargs == 0 else f"{names} `{value}`"


def _paragraphs(command: tuple[str, ...]) -> Iterator[str]:
    found = parser(command)
    yield f"{'#' * (len(command) + 1)} {' '.join(command)}"
    yield found.description or ""
    yield f"```text\n{found.format_usage().strip()}\n```"
    for action in found._actions:
        if not isinstance(action, argparse._HelpAction):
            yield f"{_name(action)}\n: {(action.help or '—').replace('%%', '%')}"


class CliReference(SphinxDirective):
    """Documents every command: its description, its usage and its options."""

    def run(self) -> list:
        """Returns the nodes of the reference."""
        text = "\n\n".join(part for command in commands() for part in _paragraphs(command))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive."""
    app.add_directive("cli-reference", CliReference)
    return {"parallel_read_safe": True}
