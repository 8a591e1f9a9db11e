"""Passages of the files of packages."""

from __future__ import annotations

import bz2
import io
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Passage(NamedTuple):
    """A passage; `query` is its title where that is a known-item query, else empty.

    Passages of one `group` (translations of one description) are in the same slices.
    """

    id: str
    text: str
    query: str
    language: str
    kind: str
    package: str
    path: str
    group: str


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields names and contents of the files in a `.deb`: an `ar` archive with a `data.tar`.

    Raises:
        ValueError: The file is not such an archive.
    """
    content = path.read_bytes()
    start = 8
    while content[:8] == b"!<arch>\n" and start + 60 <= len(content):
        size = int(content[start + 48 : start + 58])
        if content[start : start + 16].startswith(b"data.tar"):
            data = io.BytesIO(content[start + 60 : start + 60 + size])
            with tarfile.open(fileobj=data) as archive:
                for member in archive:
                    if member.isfile() and (file := archive.extractfile(member)):
                        yield member.name.removeprefix("./"), file.read()
            return
        start += 60 + size + size % 2
    raise ValueError(f"{path.name} has no data.tar")


def descriptions(path: Path, package: str, language: str) -> Iterator[Passage]:
    """Long descriptions of packages; the short one is the query."""
    for block in bz2.decompress(path.read_bytes()).decode().split("\n\n"):
        name = re.search(r"^Package: (\S+)", block, re.M)
        found = re.search(r"^Description-\w+: (.*)\n((?: .*\n?)+)", block, re.M)
        if name and found:
            text = " ".join(found[2].replace("\n .\n", "\n").split())
            group = f"description/{name[1]}"
            identity = f"{package}/{name[1]}"
            yield Passage(
                identity, text, found[1], language, "description", package, path.name, group
            )


def glosses(path: Path, package: str, language: str) -> Iterator[Passage]:
    """Definitions of WordNet without their headwords, which are the queries."""
    for name, content in members(path):
        if not Path(name).name.startswith("data."):
            continue
        for line in content.decode().splitlines():
            fields, _, gloss = line.partition(" | ")
            if line.startswith("  ") or not gloss:
                continue
            parts = fields.split()
            words = parts[4 : 4 + 2 * int(parts[3], 16) : 2]
            query = ", ".join(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
            identity = f"{package}/{Path(name).name}/{parts[0]}"
            yield Passage(
                identity, gloss.strip(), query, language, "gloss", package, name, identity
            )


EXTRACTORS: dict[str, Callable[[Path, str, str], Iterator[Passage]]] = {
    "description": descriptions,
    "gloss": glosses,
}
