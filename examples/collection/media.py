"""Slices of pages and of images."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from examples.collection import documents, images
from examples.collection.parts import (
    Query,
    add_near_duplicates,
    download,
    hash64,
    is_usable,
    rows_of,
    sketch,
    slice_folder,
    write_queries,
    write_summary,
)
from pipeline.search.generators import bm25

#: A document has at most this share of the pages of a slice.
MAX_SHARE = 0.1
#: Languages without spaces between words.
UNSPACED = ("ja", "ko", "zh")
#: A query of pages has that many words that are in headings and captions of few documents: of that
#: share, or that number.
MIN_RARE, RARE_SHARE, MAX_DOCUMENTS = 2, 0.02, 3
#: Dummy text, and accents that a font separates from their letters.
_NOT_QUERY = re.compile(r"\b(lorem|ipsum|dolor|blindtext)\b|[¨´`ˆ˜¸]", re.I)
#: Number of texts per batch for BM25.
BATCH = 10_000
#: Titles of collections, and what follows the subject in a title.
_NOT_TITLE = re.compile(
    r"clip ?art|\b(theme|collection|icons?|untitled|unnamed|svg|pattern|etiquette)\b|\w\.\w|^\W*$",
    re.I,
)
_SUFFIX = re.compile(r"[\s_\d.]+$")


def write_pages(
    data: Path,
    parts: dict[Path, dict[str, Any]],
    sizes: dict[str, int],
    missing: list[str],
    say: Callable[[str], None],
) -> None:
    """Writes slices of PDF documents, the folder `documents`."""
    rows = list(rows_of(parts))
    pages_of: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        pages_of[row["_id"].rpartition("#")[0]].append(number)
    by_text: dict[int, str] = {}  # one of equal documents
    for name, pages in pages_of.items():
        by_text.setdefault(hash64("".join(rows[n]["text"] for n in pages)), name)
    level_of = {file["package"]: file.get("slice", "") for file in parts.values()}
    levels = list(dict.fromkeys(level_of.values()))  # the packages of smaller slices first
    names = sorted(
        by_text.values(),
        key=lambda name: (levels.index(level_of[name.partition("/")[0]]), hash64(name)),
    )
    queries, found = _page_queries(rows, pages_of, names)
    chosen: dict[str, set[str]] = {}
    selected: set[str] = set()
    for name, size in sizes.items():
        num_pages = sum(len(pages_of[document]) for document in selected)
        for document in names:
            length = len(pages_of[document])
            if document not in selected and length <= min(MAX_SHARE * size, size - num_pages):
                selected.add(document)
                num_pages += length
        chosen[name] = set(selected)
    with ExitStack() as stack:
        folders = {name: stack.enter_context(slice_folder(data, name)) for name in chosen}
        for file in parts.values():
            for document, content in documents.contents(download(data, file)):
                identity = f"{file['package']}/{document}"
                targets = [
                    folders[name] / "documents" / identity
                    for name in chosen
                    if identity in chosen[name]
                ]
                if targets:
                    edited = documents.edit(content, [rows[n] for n in pages_of[identity]])
                    for target in targets:
                        target.parent.mkdir(parents=True, exist_ok=True)
                    targets[0].write_bytes(edited)
                    for target in targets[1:]:
                        os.link(targets[0], target)
        for name, folder in folders.items():
            ids = {n: rows[n]["_id"] for d in sorted(chosen[name]) for n in pages_of[d]}
            used = [
                (query, answers & ids.keys())
                for query, answers in zip(queries, found, strict=True)
                if query.key in chosen[name]
            ]
            used = [(query, answers) for query, answers in used if is_usable(answers)]
            texts = ["" if rows[n]["is_scan"] else rows[n]["text"] for n in ids]
            counts = write_queries(folder, used, ids, _codes(texts))
            infos = [
                {"language": rows[n]["language"], "package": rows[n]["_id"].partition("/")[0]}
                for n in ids
            ]
            write_summary(folder, infos, counts, missing)
            say(
                f"{data / name}: {len(ids):,} pages of {len(chosen[name]):,} documents, "
                f"{len(used):,} queries"
            )


def _page_queries(
    rows: list[dict[str, Any]], pages_of: dict[str, list[int]], names: list[str]
) -> tuple[list[Query], list[set[int]]]:
    """Returns the queries that name a page of one document, and their answers."""
    documents_of: dict[str, set[str]] = defaultdict(set)
    documents_with: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for title in row["titles"]:
            documents_of[title].add(row["_id"].rpartition("#")[0])
            for word in documents.words_of(title):
                documents_with[word].add(row["_id"].rpartition("#")[0])
    limit = max(MAX_DOCUMENTS, RARE_SHARE * len(names))
    queries: list[Query] = []
    answers: list[tuple[int, int]] = []
    for document in names:
        pages = pages_of[document]
        for place, number in enumerate(pages):
            row = rows[number]
            for kind, text, _, num_pages, _ in row["queries"]:
                words = documents.words_of(text)
                rare = [word for word in words if len(documents_with[word]) <= limit]
                is_phrase = text.count(" ") > 1 and len(rare) >= MIN_RARE
                is_fit = is_phrase or row["language"] in UNSPACED
                is_unique = len(documents_of[documents.plain(text)]) == 1
                if is_fit and is_unique and not _NOT_QUERY.search(text):
                    kind = "scan" if row["is_scan"] else kind
                    answers += [(len(queries), n) for n in pages[place : place + num_pages]]
                    queries.append(Query(text, row["language"], kind, document))
    found: list[set[int]] = [set() for _ in queries]
    for query, number in answers:
        found[query].add(number)
    selected = np.zeros(len(rows), bool)
    selected[[number for document in names for number in pages_of[document]]] = True
    add_near_duplicates(found, answers, np.array([sketch(row["text"]) for row in rows]), selected)
    return queries, found


def _codes(texts: list[str]) -> list[Any]:
    return [bm25.encode(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)]


def write_images(
    data: Path,
    parts: dict[Path, dict[str, Any]],
    sizes: dict[str, int],
    missing: list[str],
    say: Callable[[str], None],
) -> None:
    """Writes slices of images, the folder `images`."""
    titles: dict[str, dict[str, str]] = defaultdict(dict)
    rows = []
    for row in rows_of(parts):
        if "titles" in row:
            titles[row["key"]] |= row["titles"]
        else:
            rows.append(row)
    rows.sort(key=lambda row: hash64(row["_id"]))
    by_thumbnail: dict[str, set[int]] = defaultdict(set)
    for number, row in enumerate(rows):
        by_thumbnail[row["thumbnail"]].add(number)
    chosen = _image_queries([row["key"] for row in rows], titles)
    for name, size in sizes.items():
        asked = [n for n in chosen if is_usable(by_thumbnail[rows[n]["thumbnail"]])]
        first = sorted({n for m in asked for n in by_thumbnail[rows[m]["thumbnail"]]})
        numbers = sorted(list(dict.fromkeys([*first, *range(len(rows))]))[:size])
        ids = {n: rows[n]["_id"] for n in numbers}
        used = [
            (chosen[n], by_thumbnail[rows[n]["thumbnail"]] & ids.keys()) for n in asked if n in ids
        ]
        with slice_folder(data, name) as folder:
            wanted = set(ids.values())
            for file in parts.values():
                if file["reader"] not in ("titles", "annotations"):
                    for image, content in images.contents(download(data, file), file):
                        if (identity := f"{file['package']}/{image}") in wanted:
                            path = folder / "images" / identity
                            path.parent.mkdir(parents=True, exist_ok=True)
                            path.write_bytes(content)
            counts = write_queries(folder, used, ids, _codes([""] * len(ids)))
            write_summary(folder, [rows[n] for n in numbers], counts, missing)
        say(f"{data / name}: {len(ids):,} images, {len(used):,} queries")


def _image_queries(keys: Iterable[str], titles: dict[str, dict[str, str]]) -> dict[int, Query]:
    """Returns one query per image, in another language than English for half of those with several.

    A title whose words are a part of those of another image in the language is not used.
    """
    names_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for key, found in titles.items():
        for language, title in found.items():
            for word in _words(title):
                names_of[language, word].add(key)
    queries = {}
    for number, key in enumerate(keys):
        found = {
            name: _SUFFIX.sub("", " ".join(title.replace("_", " ").split()))
            for name, title in titles.get(key, {}).items()
        }
        languages = sorted(found.keys() - {"en"}, key=lambda name: hash64(key + name))
        is_translated = bool(languages) and hash64(f"cross {key}") % 2 == 1
        language = languages[0] if is_translated else "en"
        title = found.get(language, "")
        if len(title) < 3 or _NOT_TITLE.search(title) or not _words(title):
            continue
        if len(set.intersection(*(names_of[language, word] for word in _words(title)))) == 1:
            kind = "title translation" if is_translated else "title"
            queries[number] = Query(title, language, kind, key)
    return queries


def _words(title: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", _SUFFIX.sub("", title).casefold()))
