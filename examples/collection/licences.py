"""Table of the packages of the recipe with their versions and licences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from examples.collection import documents
from examples.collection.extract import members
from examples.collection.parts import RECIPE, fetch

#: Phrases of copyright files that have no `License` fields.
_PHRASES = {
    "GPL": r"General Public License|\bGPL\b",
    "GFDL": r"Free Documentation License|\bGFDL\b",
    "public domain": r"public domain",
    "BSD": r"Redistribution and use in source and binary forms|University of California",
    "PSF": r"Python Software Foundation License",
    "stated in each page": r"each file that contains nroff source",
    "MIT": r"to deal in the Software without restriction",
    "Tcl": r"permission to use, copy, modify, distribute, and license",
    "verbatim": r"permission is granted to make and distribute verbatim copies",
}
MAX_NAMES = 4
#: Release of the lists of descriptions, which have no version.
RELEASE = "12.15"


def licences(
    data: Path, recipe: Path = RECIPE, say: Callable[[str], None] = print
) -> Iterator[str]:
    """Yields the lines of a Markdown table, from the copyright files of the packages."""
    spec = yaml.safe_load(recipe.read_text())
    packages: dict[tuple[str, str], list[str]] = {}
    for file in spec["files"]:
        names = "those of the described packages"
        if file["reader"] != "descriptions":
            path = fetch(data, file, spec["mirrors"], say)
            wanted = f"usr/share/doc/{file['package']}/copyright"
            content = next((text for name, text in members(path) if name == wanted), b"")
            text = content.decode(errors="replace")
            if parts := documents.part_licences(path) if "texlive" in path.name else {}:
                free = [licence for licence in parts.values() if documents.FREE.match(licence)]
                text = "\n".join(f"License: {licence}" for licence in free)
            names = ", ".join(licence_names(text))
            names = names or "those of its source package"
        packages.setdefault((file.get("version", RELEASE), names), []).append(file["package"])
    yield "| packages | version | licences, the most frequent first |"
    yield "|---|---|---|"
    for (version, names), found in packages.items():
        yield f"| {', '.join(found)} | {version} | {names} |"


def licence_names(text: str) -> list[str]:
    r"""Returns the names of the licences in a copyright file.

    >>> licence_names("License: GPL-2+\n text\nLicense: GPL-2+\nLicense: Expat\n")
    ['GPL-2+', 'Expat']
    >>> licence_names("It is in the public domain.")
    ['public domain']
    """
    fields = re.findall(r"^Licen[cs]e: *(\S[^\n]{0,39})$", text, re.M)
    plain = " ".join(text.split())
    found = [name for name, phrase in _PHRASES.items() if re.search(phrase, plain, re.I)]
    names = [name for name, _ in Counter(fields).most_common()] or found
    rest = [f"{len(names) - MAX_NAMES} others"] if len(names) > MAX_NAMES else []
    return names[:MAX_NAMES] + rest
