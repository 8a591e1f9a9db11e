"""Unpacks archives and verifies the numbers of rows and files."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.config import SpecError
from pipeline.data.decode.untrusted import TAR_ERRORS

ERRORS = (*TAR_ERRORS, zipfile.BadZipFile, EOFError, OSError, zlib.error)


def unpack(archive: Path, members: Mapping[str, str], folder: Path) -> None:
    """Writes members of an archive below a folder.

    Args:
        archive: ZIP archive, or tar archive that may be compressed.
        members: Paths by regular expressions of the names of members, which may refer to groups.

    Raises:
        SpecError: For `members`: none has such a name, or a path is not below the folder. The
            archive is damaged, and deleted so that the next run downloads it again.
    """
    number, root = 0, folder.resolve()
    try:
        with _members(archive) as (found, open_member):
            for name, member in found:
                for pattern, target in members.items():
                    if match := re.fullmatch(pattern, name.removeprefix("./")):
                        path = (root / match.expand(target)).resolve()
                        if not path.is_relative_to(root):
                            raise SpecError("members", name, f"the path of a file in {folder}")
                        path.parent.mkdir(parents=True, exist_ok=True)
                        with open_member(member) as source, path.open("wb") as file:
                            shutil.copyfileobj(source, file, 1 << 20)
                        number += 1
    except SpecError:
        raise
    except ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:  # such as no space left
            raise
        archive.unlink()
        problem = f"is damaged ({type(error).__name__})"
        raise SpecError("members", archive.name, "an archive", problem) from None
    if not number:
        rule = f"an archive with members that match {' or '.join(members)}"
        raise SpecError("members", archive.name, rule, "has none")


@contextmanager
def _members(archive: Path) -> Iterator[tuple[Iterator[tuple[str, Any]], Callable[[Any], Any]]]:
    """Yields the files of an archive with their names, and the function that opens one."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            yield ((i.filename, i) for i in zipped.infolist() if not i.is_dir()), zipped.open
    else:
        with tarfile.open(archive, "r|*") as tar:
            yield ((member.name, member) for member in tar if member.isreg()), tar.extractfile


def count(path: Path) -> int:
    """Returns the number of rows, lines or entries of a file, or of files in a folder.

    In a folder with Parquet files, their rows are counted. For JSON, the first list counts.
    """
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
        if tables:
            return sum(pq.ParquetFile(table).metadata.num_rows for table in tables)
        hidden = (".", "_")
        return sum(f.is_file() and not f.name.startswith(hidden) for f in path.rglob("*"))
    if path.suffix == ".json":
        data = json.loads(path.read_text("utf-8"))
        return len(next(value for value in data.values() if isinstance(value, list)))
    with path.open("rb") as file:
        return sum(bool(line.strip()) for line in file) - (path.suffix in (".csv", ".tsv"))
