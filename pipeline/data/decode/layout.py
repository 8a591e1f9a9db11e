"""Detection of the reading order of a page that may contain columns of text and tables."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

#: Maximum number of words in a table cell, unless other criteria identify the table.
MAX_CELL_WORDS = 4
#: Minimum number of words in a line of prose, and minimum fraction of the column width it fills.
MIN_PROSE_WORDS, MIN_PROSE_FILL = 4, 0.7
#: Minimum fraction of non-empty cells in a table whose rows are single lines.
MIN_FILLED_CELLS = 0.85
#: Minimum space between table rows in addition to the space between the lines of a cell, measured
#: in line heights, and maximum mean number of lines per row.
MIN_ROW_GAP, MAX_LINES_PER_ROW = 0.3, 8

Item = TypeVar("Item")


@dataclass(frozen=True)
class TextLine(Generic[Item]):
    """Line of text on a page, or cell of a table.

    Attributes:
        box: Bounding box x0 y0 x1 y1 in [0, 1] of the page.
        item: The object that the line represents.
    """

    box: np.ndarray
    text: str
    item: Item

    @property
    def num_words(self) -> int:
        """Number of words in the line. Dot leaders are not counted."""
        return sum(any(c.isalnum() for c in word) for word in self.text.split())

    @property
    def is_numeric(self) -> bool:
        """True if most characters are digits or signs, as in "$ 1,299.00" or "5.3**"."""
        return 2 * sum(c.isalpha() for c in self.text) < len(self.text.replace(" ", ""))


#: Lines of a block from top to bottom.
Block = Sequence[TextLine[Item]]
#: Contents of a row, which are either one line of text or the cells of a table row.
LayoutRow = list[Item]


def is_right_to_left(text: str) -> bool:
    """Checks whether most letters of a text belong to right-to-left scripts."""
    directions = Counter(map(unicodedata.bidirectional, text))
    return directions["R"] + directions["AL"] > directions["L"]


def reading_order(
    blocks: Sequence[Block[Item]], from_right: bool = False
) -> list[list[LayoutRow[Item]]]:
    """Sorts the blocks of a page in reading order by recursive cuts along white space.

    Each column of text is read to its end before the next one. In contrast, the columns of a table
    are read together, row by row. Blocks that are not separated by a gap keep their original order.

    >>> def block(text, x0, x1, y, step=0.1):
    ...     boxes = ([x0, y + step * i, x1, y + step * i + 0.05] for i in range(9))
    ...     return [TextLine(np.array(b), t, t) for b, t in zip(boxes, text.split("|"))]
    >>> left = block("a column of|text in lines", 0.1, 0.4, 0.3)
    >>> right = block("continues in|the second", 0.5, 0.8, 0.3)
    >>> reading_order([right, left, block("title", 0.1, 0.9, 0.1)])
    [[['title']], [['a column of'], ['text in lines']], [['continues in'], ['the second']]]
    >>> reading_order([left, block("12|15.5", 0.5, 0.6, 0.3)])
    [[['a column of', '12'], ['text in lines', '15.5']]]
    """
    if len(blocks) < 2:
        return [[[line.item] for line in block] for block in blocks]
    boxes = np.stack([_hull(block) for block in blocks])
    for axis, min_gap in ((0, 0.012), (1, 0.0)):
        groups = _split_at_gap(boxes[:, axis], boxes[:, axis + 2], min_gap)
        if len(groups) > 1:
            first, second = ([blocks[i] for i in group] for group in groups)
            if axis == 0 and (table := _table(first, second, from_right)):
                return table
            if axis == 0 and from_right:
                first, second = second, first
            return [*reading_order(first, from_right), *reading_order(second, from_right)]
    return [[[line.item] for line in block] for block in blocks]


def _hull(block: Block) -> np.ndarray:
    boxes = np.stack([line.box for line in block])
    return np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])


def _split_at_gap(starts: np.ndarray, ends: np.ndarray, min_gap: float) -> list[list[int]]:
    """Splits the indices of intervals at the widest gap, if it is wider than `min_gap`."""
    order = np.argsort(starts, kind="stable")
    gaps = starts[order][1:] - np.maximum.accumulate(ends[order])[:-1]
    widest = int(gaps.argmax())
    if gaps[widest] <= min_gap:
        return [order.tolist()]
    return [sorted(group.tolist()) for group in np.split(order, [widest + 1])]


def _table(
    left: Sequence[Block[Item]], right: Sequence[Block[Item]], from_right: bool
) -> list[list[LayoutRow[Item]]] | None:
    """Returns the lines on both sides of a gap as rows of a table, or None if they are not one."""
    sides = [[line for block in side for line in block] for side in (left, right)]
    lines = sides[0] + sides[1]
    column = dict(zip(map(id, lines), _columns(lines), strict=True))
    rows = _rows(lines)
    is_table = _is_table(sides, rows)
    if not (is_table and _is_full(rows)):
        bands = _bands(rows)
        if _is_banded(sides, rows, bands):
            rows = bands
        elif not is_table:
            return None
    side = -1 if from_right else 1
    ordered = [sorted(r, key=lambda line: (side * column[id(line)], line.box[1])) for r in rows]
    return [[[line.item for line in row] for row in ordered]]


def _is_table(sides: Sequence[Sequence[TextLine]], rows: Sequence[Sequence[TextLine]]) -> bool:
    """Checks whether the sides of a gap are columns of one table with short cells in shared rows.

    The lines of two text columns can be at equal heights as well. However, they are longer than
    table cells, and neither of the columns consists of numbers.
    """
    shared = _num_shared(sides, rows)
    per_side = [len(_rows(side)) for side in sides]
    if shared < max(2, 0.75 * min(per_side), 0.4 * max(per_side)):
        return False
    lines = [*sides[0], *sides[1]]
    if any(np.mean([line.is_numeric for line in side]) > 0.5 for side in sides):
        # Numbers next to a column of text may be part of a chart.
        return shared >= 0.7 * max(per_side) or not _num_prose(lines)
    is_short = np.mean([line.num_words <= MAX_CELL_WORDS for line in lines]) >= 0.75
    # Two columns with a few short lines may be lists or addresses.
    is_long = len(rows) >= (3 if max(_columns(lines)) > 1 else 5)
    return bool(is_short and is_long and _is_full(rows))


def _is_full(rows: Sequence[Sequence[TextLine]]) -> bool:
    """Checks whether nearly all rows have a cell in every column."""
    lines = [line for row in rows for line in row]
    return len(lines) >= MIN_FILLED_CELLS * len(rows) * (1 + max(_columns(lines)))


def _is_banded(
    sides: Sequence[Sequence[TextLine]],
    rows: Sequence[Sequence[TextLine]],
    bands: Sequence[Sequence[TextLine]],
) -> bool:
    """Checks whether white space divides both sides into the same rows of multi-line cells.

    One of the columns may be prose, for example in a list of definitions, but not both.
    """
    shared = _num_shared(sides, bands)
    has_cells = len(bands) < len(rows) <= MAX_LINES_PER_ROW * len(bands)
    is_shared = shared >= 3 and shared >= 0.75 * len(bands)
    return has_cells and is_shared and _num_prose([*sides[0], *sides[1]]) < 2


def _num_shared(sides: Sequence[Sequence[TextLine]], rows: Sequence[Sequence[TextLine]]) -> int:
    """Counts the rows that have lines on both sides."""
    left = {id(line) for line in sides[0]}
    return sum(0 < sum(id(line) in left for line in row) < len(row) for row in rows)


def _num_prose(lines: Sequence[TextLine]) -> int:
    """Counts the columns of prose, in which most words belong to long lines."""
    columns: dict[int, list[TextLine]] = {}
    for line, number in zip(lines, _columns(lines), strict=True):
        columns.setdefault(number, []).append(line)
    return sum(map(_is_prose, columns.values()))


def _is_prose(column: Sequence[TextLine]) -> bool:
    x0, _, x1, _ = _hull(column)
    words = np.array([line.num_words for line in column])
    fill = np.array([line.box[2] - line.box[0] for line in column]) / (x1 - x0)
    is_full = (words >= MIN_PROSE_WORDS) & (fill >= MIN_PROSE_FILL)
    return is_full.sum() > 1 and words @ is_full >= 0.5 * words.sum()


def _rows(lines: Sequence[TextLine[Item]]) -> list[list[TextLine[Item]]]:
    """Groups lines that are at the same height into rows and sorts the rows from top to bottom."""
    ordered = sorted(lines, key=lambda line: line.box[1] + line.box[3])
    rows: list[list[TextLine[Item]]] = []
    for line in ordered:
        if rows and _is_beside(rows[-1], line):
            rows[-1].append(line)
        else:
            rows.append([line])
    return rows


def _is_beside(row: Sequence[TextLine], line: TextLine) -> bool:
    """Checks whether a line is at the height of a row and does not overlap its lines."""
    middles = [(other.box[1] + other.box[3]) / 2 for other in row]
    height = min(line.box[3] - line.box[1], *(other.box[3] - other.box[1] for other in row))
    is_level = (line.box[1] + line.box[3]) / 2 - np.mean(middles) <= 0.3 * height
    return is_level and all(
        line.box[2] <= other.box[0] or other.box[2] <= line.box[0] for other in row
    )


def _bands(rows: Sequence[list[TextLine[Item]]]) -> list[list[TextLine[Item]]]:
    """Merges rows whose distance is not larger than that between the lines of a cell."""
    tops = np.array([min(line.box[1] for line in row) for row in rows])
    ends = np.array([max(line.box[3] for line in row) for row in rows])
    gaps = tops[1:] - np.maximum.accumulate(ends)[:-1]
    if not len(gaps):
        return [[*row] for row in rows]
    is_wide = gaps > np.quantile(gaps, 0.25) + MIN_ROW_GAP * np.median(ends - tops)
    bands: list[list[TextLine[Item]]] = [[]]
    for row, starts_band in zip(rows, [False, *is_wide], strict=True):
        if starts_band:
            bands.append([])
        bands[-1] += row
    return bands


def _columns(lines: Sequence[TextLine]) -> list[int]:
    """Returns the column number of each line. Columns are separated by white space."""
    boxes = np.stack([line.box for line in lines])
    order = np.argsort(boxes[:, 0], kind="stable")
    is_new = boxes[order, 0][1:] > np.maximum.accumulate(boxes[order, 2])[:-1]
    numbers = np.zeros(len(lines), int)
    numbers[order[1:]] = is_new.cumsum()
    return numbers.tolist()
