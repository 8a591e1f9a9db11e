"""Makes slices: folders of items with queries and known answers.

Shapes: N passages, H hashes of a sketch.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from examples.collection import clips, documents, extract, images, markup, media
from examples.collection.parts import (
    RECIPE,
    Query,
    Reader,
    add_near_duplicates,
    check_space,
    hash64,
    is_usable,
    read_parts,
    rows_of,
    sketch,
    slice_folder,
    write_queries,
    write_summary,
)
from pipeline.search.generators import bm25


class Slice(NamedTuple):
    """Number of items, or 0 if another slice has them, and the unit of the numbers of queries."""

    num_items: int
    num_queries: int = 0
    family: str = "passages"


#: A slice contains the smaller ones of its family, and the answers of its queries.
SLICES = {
    "1k": Slice(1_000, 25),
    "10k": Slice(10_000, 350),
    "100k": Slice(100_000, 1_000),
    "1m": Slice(1_000_000, 2_000),
    "pages-1k": Slice(1_000, family="pages"),
    "pages-10k": Slice(10_000, family="pages"),
    "pages-100k": Slice(100_000, family="pages"),
    "images": Slice(10_000, family="images"),
    "clips": Slice(0, family="clips"),
}
#: Numbers of queries by kind, in units of a slice. BM25 answers most descriptions and synopses.
SHARES = {"definition": 2, "translation": 2, "paraphrase": 1, "heading": 1}
OTHER_SHARE = 0.5
#: Kinds of queries that ask for another edition, by the kind of the section.
CROSS = {"definition": "paraphrase"}


def _source(*modules: Any) -> str:
    return "".join(Path(module.__file__).read_text() for module in modules)


def _passages(path: Path, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for section in extract.EXTRACTORS[file["reader"]](path, file.get("language", "")):
        yield from extract.passages(section, file["package"])


READERS = {
    **dict.fromkeys(extract.EXTRACTORS, Reader("passages", _passages, _source(extract, markup))),
    "documents": Reader("pages", documents.read, _source(documents)),
    **{name: Reader("images", read, _source(images)) for name, read in images.READERS.items()},
}


def build(
    data: Path,
    names: Sequence[str],
    recipe: Path = RECIPE,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Writes slices: items, `queries.jsonl`, `qrels/*.tsv` and `summary.json`.

    A slice is in the folder `DATA/NAME`, which appears when it is complete. Downloads and extracted
    rows are kept in `DATA`, so that an interrupted run resumes.

    Returns:
        One sentence per package that could not be read; the others are written.

    Raises:
        SpecError: The disk is too small.
    """
    spec = yaml.safe_load(recipe.read_text())
    sentences: list[str] = []
    if clips.NAME in names and not (data / clips.SOURCE).exists():
        names = [*names, clips.SOURCE]
    order = list(SLICES)
    for family, write in FAMILIES.items():
        sizes_by_files: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
        for name in order:  # the smallest first
            if name in names and SLICES[name].family == family:
                numbers = tuple(
                    number
                    for number, file in enumerate(spec["files"])
                    if READERS[file["reader"]].family == family
                    and order.index(file.get("slice", order[0])) <= order.index(name)
                )
                sizes_by_files[numbers][name] = SLICES[name].num_items
        for numbers, sizes in sizes_by_files.items():
            files = [spec["files"][number] for number in numbers]
            check_space(data, files)
            parts, missing = read_parts(data, files, spec["mirrors"], READERS, say)
            if parts:
                write(data, parts, sizes, missing, say)
            sentences += [sentence for sentence in missing if sentence not in sentences]
    if clips.NAME in names and (data / clips.SOURCE).exists():
        sentences += clips.build_clips(data, say)
    return sentences


def write_passages(
    data: Path,
    parts: dict[Path, dict[str, Any]],
    sizes: dict[str, int],
    missing: list[str],
    say: Callable[[str], None],
) -> None:
    """Writes slices of passages with their texts, `corpus.jsonl`."""
    corpus = _scan(parts)
    say(f"{len(corpus.ids):,} passages, equal ones included")
    queries = choose_queries(corpus.editions)
    selected, found = find_answers(corpus, queries)
    for name, size in sizes.items():
        used = _used(queries, found, SLICES[name].num_queries)
        rows = _select(corpus, selected, found, used, size)
        with slice_folder(data, name) as folder:
            _write(folder, parts, rows, used, missing)
        say(f"{data / name}: {len(rows):,} passages, {len(used):,} queries")


FAMILIES: dict[str, Callable[..., None]] = {
    "passages": write_passages,
    "pages": media.write_pages,
    "images": media.write_images,
}


# -- queries and slices ----------------------------------------------------------------------------


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


def _scan(parts: dict[Path, dict[str, Any]]) -> Corpus:
    hashes, sketches = [], []
    editions: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows_of(parts):
        text, key = " ".join(row["text"].casefold().split()), row["key"]
        answer = f"{key} {row['edition']}" if "query" in row else ""
        hashes.append((hash64(text), hash64(key), hash64(answer), hash64(row["_id"])))
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
        for key in sorted(keys, key=hash64):
            editions_of = {row["edition"]: row for row in keys[key]}
            names = sorted(editions_of, key=lambda name: hash64(f"{key} {name}"))
            is_cross = len(names) > 1 and hash64(f"cross {key}") % 2 == 1
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
    and ids are not in the collection. Near-duplicates of an answer are answers.
    """
    is_first = np.zeros(len(corpus.ids), bool)  # lists of descriptions have versions of a package
    is_first[np.unique(corpus.ids, return_index=True)[1]] = True
    reserved = np.array([hash64(query.key) for query in queries], np.uint64)
    answers = {hash64(f"{query.key} {query.edition}"): n for n, query in enumerate(queries)}
    is_answer = is_first & np.isin(corpus.answers, np.array(list(answers), np.uint64))
    candidates = np.flatnonzero(is_first & (is_answer | ~np.isin(corpus.keys, reserved)))
    _, first, inverse = np.unique(corpus.texts[candidates], return_index=True, return_inverse=True)
    unique = np.zeros(len(is_answer), bool)
    unique[candidates[first]] = True
    found: list[set[int]] = [set() for _ in queries]
    places: list[tuple[int, int]] = []
    for place in np.flatnonzero(is_answer[candidates]):
        row = int(candidates[place])
        number = answers[int(corpus.answers[row])]
        found[number].add(int(candidates[first[inverse[place]]]))
        places.append((number, row))
    add_near_duplicates(found, places, corpus.sketches, unique)
    return unique, found


def _used(
    queries: list[Query], found: list[set[int]], num_queries: int
) -> list[tuple[Query, set[int]]]:
    """Returns the queries of a slice with their answers."""
    return [
        (query, rows)
        for query, rows in zip(queries, found, strict=True)
        if query.rank < num_queries and is_usable(rows)
    ]


def _select(
    corpus: Corpus,
    selected: np.ndarray,
    found: list[set[int]],
    used: list[tuple[Query, set[int]]],
    num_passages: int,
) -> np.ndarray:
    """Returns the rows of a slice: answers, and passages that answer no query, by their hashes.

    The answers are first, and those of smaller slices before others, so that the beginning of an
    interrupted index has them.
    """
    order = sorted(used, key=lambda item: item[0].rank)
    needed = np.array(list(dict.fromkeys(row for _, rows in order for row in sorted(rows))), int)
    is_other = selected.copy()
    is_other[[row for rows in found for row in rows]] = False
    others = np.flatnonzero(is_other)
    others = others[np.argsort(corpus.ids[others], kind="stable")]
    return np.append(needed, others[: max(num_passages - len(needed), 0)])


def _write(
    folder: Path,
    parts: dict[Path, dict[str, Any]],
    rows: np.ndarray,
    used: list[tuple[Query, set[int]]],
    missing: list[str],
) -> None:
    places = {row: place for place, row in enumerate(rows.tolist())}
    lines = [""] * len(rows)
    ids: dict[int, str] = {}
    codes, texts, infos = [], [], []
    for number, row in enumerate(rows_of(parts)):
        if number in places:
            ids[number] = row["_id"]
            fields = {name: row[name] for name in ("_id", "text", "language", "package")}
            lines[places[number]] = json.dumps(fields, ensure_ascii=False) + "\n"
            infos.append({name: row[name] for name in ("language", "package")})
            texts.append(row["text"])
            if len(texts) == 10_000:
                codes.append(bm25.encode(texts))
                texts = []
    codes.append(bm25.encode(texts))
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(lines)
    write_summary(folder, infos, write_queries(folder, used, ids, codes), missing)
