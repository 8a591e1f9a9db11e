"""Downloads the packages of the recipe, extracts their rows, and writes queries.

Shapes: N rows, H hashes of a sketch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from examples.papers.downloads.fetch import fetch_url
from pipeline.config import SpecError
from pipeline.runtime.atomic import open_atomic
from pipeline.search.generators import bm25

RECIPE = Path(__file__).with_name("recipe.yaml")
HALVES = ("choose", "prove")
#: A query with more answers says too little.
MAX_ANSWERS = 10
#: Two texts are near-duplicates if they share that many hashes of their sketches.
SKETCH, MIN_SHARED = 8, 7


class Reader(NamedTuple):
    """Reader of a package.

    Attributes:
        family: Family of slices that contain the rows.
        read: Yields the rows of a file for an entry of the recipe.
        version: Changes if the rows do.
    """

    family: str
    read: Callable[[Path, dict[str, Any]], Iterator[dict[str, Any]]]
    version: str


def check_space(data: Path, files: list[dict[str, Any]]) -> None:
    """Raises `SpecError` if the disk is too small for the missing packages and their passages."""
    absent = [file for file in files if not download(data, file).exists()]
    needed = 6 * sum(file["bytes"] for file in absent)
    parent = next(path for path in (data, *data.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        rule = f"on a disk with {needed / 1e9:.1f} GB of free space"
        raise SpecError("DATA", str(data), rule, f"has {free / 1e9:.1f} GB")


def download(data: Path, file: dict[str, Any]) -> Path:
    """Returns where the file of a package is kept."""
    return data / "downloads" / Path(file["path"]).name


def fetch(data: Path, file: dict[str, Any], mirrors: list[str], say: Callable[[str], None]) -> Path:
    """Returns the verified file of a package, from the first mirror that has it."""
    path = download(data, file)
    for number, mirror in enumerate(mirrors):
        try:
            fetch_url(f"{mirror}/{file['path']}", path, f"sha256:{file['sha256']}", say)
            break
        except SpecError:
            if number == len(mirrors) - 1:
                raise
    return path


def read_parts(
    data: Path,
    files: Sequence[dict[str, Any]],
    mirrors: list[str],
    readers: Mapping[str, Reader],
    say: Callable[[str], None],
) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """Returns entries of the recipe by the files of their rows, and sentences about the others."""
    parts: dict[Path, dict[str, Any]] = {}
    missing = []
    for file in files:
        try:
            parts[_part(data, file, mirrors, readers[file["reader"]], say)] = file
        except (SpecError, ValueError, tarfile.TarError, EOFError, zlib.error) as error:
            missing.append(f"{file['package']}: {error}")
            say(f"missing package {missing[-1]}")
    return parts, missing


def _part(
    data: Path,
    file: dict[str, Any],
    mirrors: list[str],
    reader: Reader,
    say: Callable[[str], None],
) -> Path:
    """Returns the JSON lines of a package, which are extracted once."""
    part = data / "parts" / f"{file['package']}-{hash64(f'{reader.version} {file}'):016x}.jsonl"
    if not part.exists():
        path = fetch(data, file, mirrors, say)
        number = 0
        with open_atomic(str(part)) as output:
            for row in reader.read(path, file):
                output.write(json.dumps(row, ensure_ascii=False) + "\n")
                number += 1
        say(f"{file['package']}: {number:,} rows")
    return part


def rows_of(parts: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yields the rows of files of JSON lines."""
    for part in parts:
        with part.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def hash64(text: str) -> int:
    """Returns a hash of 64 bits, which is equal on all machines."""
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# -- queries --------------------------------------------------------------------------------------


class Query(NamedTuple):
    """A query whose answers begin the sections of an edition of a key.

    It is in the slices of passages whose number of queries is above `rank`.
    """

    text: str
    language: str
    kind: str
    key: str
    edition: str = ""
    rank: float = 0


def sketch(text: str) -> np.ndarray:
    """Returns the smallest hashes (H,) uint32 of the windows of 8 bytes of a text.

    The share of common hashes estimates the share of common windows. Missing ones are 0.
    """
    content = np.frombuffer("".join(text.casefold().split()).encode().ljust(8), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(content, 8).copy().view("<u8")[:, 0]
    mixed = (windows ^ (windows >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    hashes = mixed >> np.uint64(32)
    smallest = np.unique(hashes)[:SKETCH]
    return np.pad(smallest, (0, SKETCH - len(smallest))).astype(np.uint32)


def add_near_duplicates(
    found: list[set[int]],
    answers: Iterable[tuple[int, int]],
    sketches: np.ndarray,
    selected: np.ndarray,
) -> None:
    """Adds the near-duplicates of answers, pairs of a query and a row, to the answers `found`.

    Args:
        sketches: Sketches (N, H), see `sketch`.
        selected: Which rows (N,) are in the collection.
    """
    owners: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for number, row in answers:
        for value in sketches[row].tolist():
            owners[value].add((number, row))
    owners.pop(0, None)
    shared = np.isin(sketches, np.array(list(owners), np.uint32)).sum(1)
    for row in np.flatnonzero(selected & (shared >= MIN_SHARED)).tolist():
        values = sketches[row].tolist()
        counts = Counter(owner for value in values for owner in owners.get(value, ()))
        for (number, _), count in counts.items():
            if count >= MIN_SHARED:
                found[number].add(row)


def is_usable(answers: set[int]) -> bool:
    """Returns whether a query with these answers says enough."""
    return 0 < len(answers) <= MAX_ANSWERS


@contextmanager
def slice_folder(data: Path, name: str) -> Iterator[Path]:
    """Yields a folder that becomes the slice when it is complete."""
    folder, temporary = data / name, data / f".{name}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def write_queries(
    folder: Path,
    used: Iterable[tuple[Query, set[int]]],
    ids: dict[int, str],
    codes: Sequence[pa.ListArray],
) -> dict[str, int]:
    """Writes `queries.jsonl` and `qrels/*.tsv` of a slice and returns its numbers of queries.

    Args:
        used: Queries with the rows of their answers.
        ids: Id by row, in the order of `codes`.
        codes: Texts of the rows, encoded for BM25.
    """
    ranker = bm25.Postings(bm25.Bm25(bm25.Bm25.Spec(), bm25.statistics(codes)), codes)
    rows = list(ids)
    summary: Counter[str] = Counter()
    qrels = {half: ["query-id\tcorpus-id\tscore\n"] for half in HALVES}
    with (folder / "queries.jsonl").open("w", encoding="utf-8") as file:
        for query, answers in used:
            identity, half = f"{hash64(query.text + query.key):016x}", HALVES[hash64(query.key) % 2]
            scores = ranker.scores(query.text)
            best = np.argpartition(-scores, min(10, len(scores) - 1))[:10]
            is_found = any(rows[index] in answers for index in best if scores[index] > 0)
            line = {"_id": identity, "text": query.text, "kind": query.kind}
            line |= {"language": query.language, "bm25": "found" if is_found else "not found"}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            qrels[half] += [f"{identity}\t{ids[row]}\t1\n" for row in sorted(answers)]
            summary[f"{half}, {query.kind}, BM25 {line['bm25']}"] += 1
    (folder / "qrels").mkdir()
    for half, lines in qrels.items():
        (folder / "qrels" / f"{half}.tsv").write_text("".join(lines), encoding="utf-8")
    return dict(sorted(summary.items()))


def write_summary(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    queries: dict[str, int],
    missing: list[str],
) -> None:
    """Writes `summary.json`: numbers of rows and queries, and packages that are missing."""
    fields = [field for field in ("language", "package") if rows and field in rows[0]]
    counts: dict[str, Any] = {
        field: dict(Counter(row[field] for row in rows).most_common()) for field in fields
    }
    summary = {"items": len(rows), **counts, "queries": queries, "missing": missing}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False))
