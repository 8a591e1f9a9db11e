"""Facets and samples of the items of an index, sizes of its representations, example queries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import IndexReader, quote

#: Columns with facets.
FACET_COLUMNS = ("modality", "source")
#: Maximum number of values of a facet.
MAX_VALUES = 50
#: Number of items from which the size of a representation is estimated.
SAMPLE_ITEMS = 64
#: Number of example queries, their maximum length in characters, and their minimum number of words.
NUM_EXAMPLES, MAX_EXAMPLE_CHARS, MIN_EXAMPLE_WORDS = 6, 90, 2
#: Number of sample items, and of rows of each modality and source from which they are selected.
NUM_SAMPLES, SAMPLE_ROWS = 24, 256
#: Modalities of items that have an image.
VISUAL = ("image", "page", "video")

T = TypeVar("T")


@dataclass(frozen=True)
class Facet:
    """Values of a column with the number of items that have them.

    Attributes:
        values: (value, number of items), the most frequent values first.
        num_values: Number of different values, which may exceed the length of `values`.
    """

    column: str
    values: list[tuple[str, int]]
    num_values: int


@dataclass(frozen=True)
class RepresentationSize:
    """Size of a representation, estimated from a sample of the items.

    Attributes:
        vectors_per_item: Mean number of vectors per item that has any.
        bytes_per_item: Mean size of these vectors, in bytes.
    """

    name: str
    vectors_per_item: float
    bytes_per_item: float


@dataclass(frozen=True)
class ExampleQuery:
    """Example query and the name of the representation that answers it."""

    query: str
    representation: str


@dataclass(frozen=True)
class SampleItem:
    """Item that shows what an index contains.

    Attributes:
        title: Title or caption of the item, else the beginning of its text or its id.
    """

    item_id: str
    modality: str
    title: str


@dataclass(frozen=True)
class IndexFacets:
    """Facets and samples of an index, sizes of its representations and example queries."""

    facets: list[Facet]
    sizes: list[RepresentationSize]
    examples: list[ExampleQuery]
    samples: list[SampleItem]


def index_facets(index: IndexReader) -> IndexFacets:
    """Computes the facets of an index.

    Sizes, examples and samples are those of some of the items.
    """
    groups: Counter[tuple[str, ...]] = Counter()
    for batch in index.batches(FACET_COLUMNS, batch_rows=1 << 16):
        table = pa.Table.from_batches([batch]).group_by([*FACET_COLUMNS])
        counted = table.aggregate([([], "count_all")])
        for row in counted.to_pylist():
            groups[tuple(row[column] for column in FACET_COLUMNS)] += row["count_all"]
    facets = []
    for position, column in enumerate(FACET_COLUMNS):
        counts: Counter[str] = Counter()
        for values, count in groups.items():
            counts[values[position]] += count
        ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        facets.append(Facet(column, ordered[:MAX_VALUES], len(ordered)))
    num_items = sum(groups.values())
    sizes = [_size(index, name, num_items) for name in index.representations()]
    found = [size for size in sizes if size]
    return IndexFacets(facets, found, _examples(index, groups), _samples(index, groups))


def _size(index: IndexReader, name: str, num_items: int) -> RepresentationSize | None:
    """Estimates the size from evenly spaced items, or the first with vectors if those have none."""
    info, codec = index.representation(name), index.codec(name)
    rows = np.unique(np.linspace(0, max(num_items - 1, 0), SAMPLE_ITEMS).astype(int)).tolist()
    with index.corruption_errors():
        column = index.dataset.take(rows[:num_items], columns=[info.column])[info.column]
        if column.null_count == len(column):
            filter = f"`{info.column}` IS NOT NULL"
            table = index.dataset.to_table([info.column], filter=filter, limit=SAMPLE_ITEMS)
            column = table[info.column]
    length = pc.mean(pc.list_value_length(column)).as_py()
    if length is None:
        return None
    return RepresentationSize(name, length, length * codec.token_bytes(info.dim))


def _examples(index: IndexReader, groups: Counter[tuple[str, ...]]) -> list[ExampleQuery]:
    """Returns short texts of as many modalities and sources as possible, with representations."""
    answering = _example_representations(index)
    by_group = []
    for values, _ in groups.most_common(NUM_EXAMPLES):
        found: list[ExampleQuery] = []
        for field, info in answering.items():
            with index.corruption_errors():
                table = index.dataset.to_table(
                    [field, info.column],
                    filter=f"{_condition(values)} AND {field} IS NOT NULL",
                    limit=2 * NUM_EXAMPLES,
                )
            rows = table.filter(table[info.column].is_valid())[field].to_pylist()
            texts = dict.fromkeys(filter(None, map(_example, rows)))
            found += [ExampleQuery(text, info.name) for text in texts]
        by_group.append(found)
    examples: dict[str, ExampleQuery] = {}
    for example in _interleaved(by_group):
        examples.setdefault(example.query, example)
    return list(examples.values())[:NUM_EXAMPLES]


def _samples(index: IndexReader, groups: Counter[tuple[str, ...]]) -> list[SampleItem]:
    """Returns items of as many modalities and sources as possible, those with an image first."""
    by_group = []
    for values, _ in groups.most_common(NUM_SAMPLES):
        with index.corruption_errors():
            columns = ["item_id", "parent_id", "modality", "title", "text", "caption"]
            table = index.dataset.to_table(columns, filter=_condition(values), limit=SAMPLE_ROWS)
        # One item per parent, if there are enough: neighbouring pages look alike.
        rows = table.to_pylist()
        by_parent = list({row["parent_id"]: row for row in reversed(rows)}.values())[::-1]
        rows = by_parent if len(by_parent) >= NUM_SAMPLES else rows
        by_group.append(rows[:: max(1, len(rows) // NUM_SAMPLES)])
    samples = [
        SampleItem(row["item_id"], row["modality"], _title(row))
        for row in list(_interleaved(by_group))[:NUM_SAMPLES]
    ]
    return sorted(samples, key=lambda sample: sample.modality not in VISUAL)


def _title(row: dict[str, str]) -> str:
    """Returns a short title of an item. Text of OCR or of speech recognition makes a poor one."""
    text = row["text"] if row["modality"] == "text" else ""
    title = row["title"] or row["caption"] or text or row["item_id"]
    return " ".join(title.split())[:MAX_EXAMPLE_CHARS]


def _condition(values: tuple[str, ...]) -> str:
    """Returns the filter of the items of a group."""
    pairs = zip(FACET_COLUMNS, values, strict=True)
    return " AND ".join(f"{column} = {quote(value)}" for column, value in pairs)


def _interleaved(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yields the first element of each group, then the second ones, and so on."""
    longest = max(map(len, groups), default=0)
    return (group[i] for i in range(longest) for group in groups if i < len(group))


def _example_representations(index: IndexReader) -> dict[str, RepresentationInfo]:
    """Returns the representations that answer captions and texts, the default one first.

    Without a representation of captions, a caption is a query of images if the encoder reads
    images.
    """
    infos = index.representations()
    ordered = [infos[name] for name in sorted(infos, key=lambda name: name != "full")]
    found: dict[str, RepresentationInfo] = {}
    for info in ordered:
        if "text" in info.encoder.query_kinds and info.field != "image":
            found.setdefault("text" if info.field == "content" else info.field, info)
    content = found.get("text")
    if content is not None and "image" in content.encoder.query_kinds:
        found.setdefault("caption", content)
    return dict(sorted(found.items()))


def _example(text: str) -> str:
    r"""Returns the first sentence or line with at least two words, which page numbers are not.

    >>> _example("47698\nAPPENDIX A\nThe lift of a wing")
    'The lift of a wing'
    """
    for sentence in re.split(r"[\n.?!]", text):
        words = sentence.split()
        if sum(len(re.findall(r"[^\W\d_]", word)) > 1 for word in words) < MIN_EXAMPLE_WORDS:
            continue
        while len(" ".join(words)) > MAX_EXAMPLE_CHARS:
            words.pop()
        return " ".join(words)
    return ""
