"""Downloads the packages of the recipe, extracts their passages and writes slices of them.

Shapes: N passages, H hashes of a sketch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from examples.collection import extract, markup
from examples.collection.extract import EXTRACTORS, passages
from examples.papers.downloads.fetch import fetch_url
from pipeline.config import SpecError
from pipeline.runtime.atomic import open_atomic
from pipeline.search.generators import bm25

RECIPE = Path(__file__).with_name("recipe.yaml")


class Slice(NamedTuple):
    """Number of passages, or None for all, and the unit of the numbers of queries."""

    num_passages: int | None
    num_queries: int


#: Each slice contains the smaller ones, and the answers of its queries.
SLICES = {
    "1k": Slice(1_000, 25),
    "10k": Slice(10_000, 350),
    "100k": Slice(100_000, 1_000),
    "all": Slice(None, 2_000),
}
HALVES = ("choose", "prove")
#: Numbers of queries by kind, in units of a slice. BM25 answers most descriptions and synopses.
SHARES = {"definition": 2, "translation": 2, "paraphrase": 1, "heading": 1}
OTHER_SHARE = 0.5
#: Kinds of queries that ask for another edition, by the kind of the section.
CROSS = {"definition": "paraphrase"}
#: A query with more answers says too little.
MAX_ANSWERS = 10
#: Two passages are near-duplicates if they share that many hashes of their sketches.
SKETCH, MIN_SHARED = 8, 7


def build(
    data: Path,
    names: Sequence[str],
    recipe: Path = RECIPE,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Writes slices: `corpus.jsonl`, `queries.jsonl`, `qrels/*.tsv` and `summary.json`.

    A slice is in the folder `DATA/NAME`, which appears when it is complete. Downloads and extracted
    passages are kept in `DATA`, so that an interrupted run resumes.

    Returns:
        One sentence per package that could not be read; the others are written.

    Raises:
        SpecError: The disk is too small.
    """
    spec = yaml.safe_load(recipe.read_text())
    check_space(data, spec["files"])
    parts, missing = [], []
    for file in spec["files"]:
        try:
            parts.append(_part(data, file, spec["mirrors"], say))
        except (SpecError, ValueError, tarfile.TarError, EOFError, zlib.error) as error:
            missing.append(f"{file['package']}: {error}")
            say(f"missing package {missing[-1]}")
    if not parts:
        raise SpecError("DATA", str(data), "a folder with at least one package", "has none")
    corpus = _scan(parts)
    say(f"{len(corpus.ids):,} passages, equal ones included")
    queries = choose_queries(corpus.editions)
    selected, found = find_answers(corpus, queries)
    for name in names:
        folder, temporary = data / name, data / f".{name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "qrels").mkdir(parents=True)
        used = _used(queries, found, SLICES[name].num_queries)
        rows = _select(corpus, selected, found, used, SLICES[name].num_passages)
        summary = _write(temporary, parts, rows, used) | {"missing": missing}
        (temporary / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        say(f"{folder}: {summary['passages']:,} passages, {len(used):,} queries")
    return missing


def check_space(data: Path, files: list[dict[str, Any]]) -> None:
    """Raises `SpecError` if the disk is too small for the missing packages and their passages."""
    absent = [file for file in files if not _download(data, file).exists()]
    needed = 6 * sum(file["bytes"] for file in absent)
    parent = next(path for path in (data, *data.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        rule = f"on a disk with {needed / 1e9:.1f} GB of free space"
        raise SpecError("DATA", str(data), rule, f"has {free / 1e9:.1f} GB")


def _download(data: Path, file: dict[str, Any]) -> Path:
    return data / "downloads" / Path(file["path"]).name


def fetch(data: Path, file: dict[str, Any], mirrors: list[str], say: Callable[[str], None]) -> Path:
    """Returns the verified file of a package, from the first mirror that has it."""
    path = _download(data, file)
    for number, mirror in enumerate(mirrors):
        try:
            fetch_url(f"{mirror}/{file['path']}", path, f"sha256:{file['sha256']}", say)
            break
        except SpecError:
            if number == len(mirrors) - 1:
                raise
    return path


@functools.cache
def _code() -> str:
    return "".join(Path(module.__file__ or "").read_text() for module in (extract, markup))


# -- passages of packages --------------------------------------------------------------------------


def _part(data: Path, file: dict[str, Any], mirrors: list[str], say: Callable[[str], None]) -> Path:
    """Returns the JSON lines of the passages of a package, which are extracted once."""
    code = _hash(f"{_code()} {file}")
    part = data / "parts" / f"{file['package']}-{code:016x}.jsonl"
    if not part.exists():
        path = fetch(data, file, mirrors, say)
        sections = EXTRACTORS[file["reader"]](path, file.get("language", ""))
        number = 0
        with open_atomic(str(part)) as output:
            for section in sections:
                for row in passages(section, file["package"]):
                    output.write(json.dumps(row, ensure_ascii=False) + "\n")
                    number += 1
        say(f"{file['package']}: {number:,} passages")
    return part


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


# -- queries and slices ----------------------------------------------------------------------------


class Query(NamedTuple):
    """A query whose answers begin the sections of an edition of a key.

    It is in the slices whose number of queries is above `rank`.
    """

    text: str
    language: str
    kind: str
    key: str
    edition: str
    rank: float


class Corpus(NamedTuple):
    """Hashes of all passages, and the editions of the keys that have queries.

    Attributes:
        texts: Hashes (N,) of the texts.
        keys: Hashes (N,) of the keys.
        answers: Hashes (N,) of keys with editions, for passages with a query.
        ids: Hashes (N,) of the ids.
        sketches: Sketches (N, H), see `sketch`.
        editions: Rows with a query by kind and key.
    """

    texts: np.ndarray
    keys: np.ndarray
    answers: np.ndarray
    ids: np.ndarray
    sketches: np.ndarray
    editions: dict[str, dict[str, list[dict[str, Any]]]]


def _scan(parts: list[Path]) -> Corpus:
    hashes, sketches = [], []
    editions: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows(parts):
        text, key = " ".join(row["text"].casefold().split()), row["key"]
        answer = f"{key} {row['edition']}" if "query" in row else ""
        hashes.append((_hash(text), _hash(key), _hash(answer), _hash(row["_id"])))
        sketches.append(sketch(row["text"]))
        if "query" in row:
            fields = ("edition", "language", "query", "alternative")
            edition = {field: row[field] for field in fields} | {"text": hashes[-1][0]}
            editions[row["kind"]][key].append(edition)
    texts, keys, answers, ids = np.array(hashes, np.uint64).reshape(-1, 4).T
    return Corpus(texts, keys, answers, ids, np.array(sketches), editions)


def choose_queries(editions: dict[str, dict[str, list[dict[str, Any]]]]) -> list[Query]:
    """Chooses the queries of each kind in the order of the hashes of their keys.

    The answers are the passages of one edition. Half of the keys with several editions have a
    query of another edition. A query that several keys share is not used.
    """
    keys_of: dict[str, set[str]] = defaultdict(set)
    for keys in editions.values():
        for key, rows in keys.items():
            for row in rows:
                keys_of[row["query"].casefold()].add(key)
    limit = max(size.num_queries for size in SLICES.values())
    queries: list[Query] = []
    ranks = Counter[str]()
    for kind, keys in editions.items():
        for key in sorted(keys, key=_hash):
            editions_of = {row["edition"]: row for row in keys[key]}
            names = sorted(editions_of, key=lambda name: _hash(f"{key} {name}"))
            is_cross = len(names) > 1 and _hash(f"cross {key}") % 2 == 1
            answer, row = editions_of[names[0]], editions_of[names[is_cross]]
            asked = CROSS.get(kind, "translation") if is_cross else kind
            text = (row["alternative"] if is_cross else "") or row["query"]
            is_same = is_cross and text.casefold() == answer["query"].casefold()
            if is_same or sum(other["text"] == answer["text"] for other in keys[key]) > 1:
                continue  # is not translated
            rank = ranks[asked] / SHARES.get(asked, OTHER_SHARE)
            if len(keys_of[row["query"].casefold()]) == 1 and rank < limit:
                queries.append(Query(text, row["language"], asked, key, names[0], rank))
                ranks[asked] += 1
    return queries


def find_answers(corpus: Corpus, queries: list[Query]) -> tuple[np.ndarray, list[set[int]]]:
    """Returns which passages are in the collection (N,), and the answers of each query.

    The rest of the section of an answer, its other editions, and all but the first of equal texts
    are not in the collection. Near-duplicates of an answer are answers.
    """
    reserved = np.array([_hash(query.key) for query in queries], np.uint64)
    answers = {_hash(f"{query.key} {query.edition}"): n for n, query in enumerate(queries)}
    is_answer = np.isin(corpus.answers, np.array(list(answers), np.uint64))
    candidates = np.flatnonzero(is_answer | ~np.isin(corpus.keys, reserved))
    _, first, inverse = np.unique(corpus.texts[candidates], return_index=True, return_inverse=True)
    unique = np.zeros(len(is_answer), bool)
    unique[candidates[first]] = True
    found: list[set[int]] = [set() for _ in queries]
    owners: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for place in np.flatnonzero(is_answer[candidates]):
        row = int(candidates[place])
        number = answers[int(corpus.answers[row])]
        found[number].add(int(candidates[first[inverse[place]]]))
        for value in corpus.sketches[row].tolist():
            owners[value].add((number, row))
    owners.pop(0, None)
    shared = np.isin(corpus.sketches, np.array(list(owners), np.uint32)).sum(1)
    for row in np.flatnonzero(unique & (shared >= MIN_SHARED)).tolist():
        values = corpus.sketches[row].tolist()
        counts = Counter(owner for value in values for owner in owners.get(value, ()))
        for (number, _), count in counts.items():
            if count >= MIN_SHARED:
                found[number].add(row)
    return unique, found


def _used(
    queries: list[Query], found: list[set[int]], num_queries: int
) -> list[tuple[Query, set[int]]]:
    """Returns the queries of a slice with their answers."""
    return [
        (query, rows)
        for query, rows in zip(queries, found, strict=True)
        if query.rank < num_queries and 0 < len(rows) <= MAX_ANSWERS
    ]


def _select(
    corpus: Corpus,
    selected: np.ndarray,
    found: list[set[int]],
    used: list[tuple[Query, set[int]]],
    num_passages: int | None,
) -> np.ndarray:
    """Returns the rows of a slice: answers, and passages that answer no query, by their hashes."""
    if num_passages is None:
        return np.flatnonzero(selected)
    needed = np.array(sorted({row for _, rows in used for row in rows}), np.int64)
    is_other = selected.copy()
    is_other[[row for rows in found for row in rows]] = False
    others = np.flatnonzero(is_other)
    others = others[np.argsort(corpus.ids[others], kind="stable")]
    return np.sort(np.append(needed, others[: max(num_passages - len(needed), 0)]))


def _write(
    folder: Path, parts: list[Path], rows: np.ndarray, used: list[tuple[Query, set[int]]]
) -> dict[str, Any]:
    """Writes the files of a slice and returns its numbers of passages and queries."""
    wanted = set(rows.tolist())
    ids: dict[int, str] = {}
    codes, texts = [], []
    counts: dict[str, Counter[str]] = {"language": Counter(), "package": Counter()}
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(parts)):
            if number in wanted:
                ids[number] = row["_id"]
                for field, counter in counts.items():
                    counter[row[field]] += 1
                fields = {"_id": row["_id"], "text": row["text"], "language": row["language"]}
                file.write(json.dumps(fields | {"package": row["package"]}, ensure_ascii=False))
                file.write("\n")
                texts.append(row["text"])
                if len(texts) == 10_000:
                    codes.append(bm25.encode(texts))
                    texts = []
    codes.append(bm25.encode(texts))
    ranker = bm25.Postings(bm25.Bm25(bm25.Bm25.Spec(), bm25.statistics(codes)), codes)
    summary: Counter[str] = Counter()
    qrels = {half: ["query-id\tcorpus-id\tscore\n"] for half in HALVES}
    with (folder / "queries.jsonl").open("w", encoding="utf-8") as file:
        for query, answers in used:
            identity, half = f"{_hash(query.text + query.key):016x}", HALVES[_hash(query.key) % 2]
            scores = ranker.scores(query.text)
            best = np.argpartition(-scores, min(10, len(scores) - 1))[:10]
            is_found = any(rows[index] in answers for index in best if scores[index] > 0)
            line = {"_id": identity, "text": query.text, "kind": query.kind}
            line |= {"language": query.language, "bm25": "found" if is_found else "not found"}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            qrels[half] += [f"{identity}\t{ids[row]}\t1\n" for row in sorted(answers)]
            summary[f"{half}, {query.kind}, BM25 {line['bm25']}"] += 1
    for half, lines in qrels.items():
        (folder / "qrels" / f"{half}.tsv").write_text("".join(lines), encoding="utf-8")
    return {
        "passages": len(rows),
        **{field: dict(counter.most_common()) for field, counter in counts.items()},
        "queries": dict(sorted(summary.items())),
    }


def _rows(parts: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for part in parts:
        with part.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
