"""Formatting of numbers and tables as plain text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

#: First characters of a formula, which may have full width, after any apostrophes.
_FORMULA = "'*[=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20]"


class Table(list[Sequence[Any]]):
    """Rows of cells. The first row is the header."""

    def text(self) -> str:
        """Formats texts as plain text. Numeric columns are aligned to the right.

        >>> print(Table([["method", "K"], ["hpool", "8"], ["samer", "16"]]).text())
        method   K
        hpool    8
        samer   16
        """
        columns = self._columns
        widths = [max(map(len, column)) for column in columns]
        is_number = [any(cell[:1].isdigit() for cell in column[1:]) for column in columns]
        lines = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(row, widths, is_number, strict=True)
            ).rstrip()
            for row in self
        ]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Formats texts as a Markdown table."""
        header, *rows = self
        lines = [header, ["---"] * len(header), *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def csv(self) -> str:
        r"""Formats cells as CSV.

        Texts that spreadsheets would evaluate as formulas get a leading apostrophe.

        >>> Table([["-1.5", "-", "=1+1", "'+x", -2]]).csv()
        "-1.5,-,'=1+1,''+x,-2\n"
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([[_without_formula(cell) for cell in row] for row in self])
        return text.getvalue()

    def latex(self) -> str:
        r"""Formats cells of LaTeX as a table, which needs the package booktabs.

        >>> print(Table([["method", "K"], ["hpool", "8"]]).latex(), end="")
        \begin{tabular}{lr}
        \toprule
        method & K \\
        \midrule
        hpool & 8 \\
        \bottomrule
        \end{tabular}
        """
        is_number = [any(cell[:1].isdigit() for cell in column[1:]) for column in self._columns]
        alignment = "".join("r" if number else "l" for number in is_number)
        header, *rows = (" & ".join(row) + r" \\" for row in self)
        lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", header, r"\midrule"]
        lines += [*rows, r"\bottomrule", r"\end{tabular}"]
        return "".join(f"{line}\n" for line in lines)

    @property
    def _columns(self) -> list[tuple[Any, ...]]:
        return list(zip(*self, strict=True))


def tex(text: str) -> str:
    r"""Escapes a text for LaTeX.

    >>> print(tex("hpool_32 & <50 %"))
    hpool\_32 \& $<$50 \%
    """
    names = {"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum"}
    escapes = {character: f"\\{character}" for character in "&%$#_{}"}
    escapes |= {character: rf"\{name}{{}}" for character, name in names.items()}
    escapes |= {"<": "$<$", ">": "$>$"}
    return "".join(escapes.get(character, character) for character in text)


def _without_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or cell == "-" or not re.match(_FORMULA, cell):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def decimal(value: float | None) -> str:
    """Formats a number with three decimals.

    >>> decimal(0.9756), decimal(None)
    ('0.976', '-')
    """
    return "-" if value is None else f"{value:.3f}"


def percentage(value: float | None) -> str:
    """Formats a fraction in percent.

    >>> percentage(0.9756), percentage(None)
    ('97.6 %', '-')
    """
    return "-" if value is None else f"{100 * value:.1f} %"


def p_value(p: float | None) -> str:
    """Formats a p value with three decimals.

    >>> p_value(0.0302), p_value(0.0001), p_value(None)
    ('0.030', '<0.001', '-')
    """
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def p_equals(p: float | None) -> str:
    """Formats a p value for a sentence.

    >>> p_equals(0.0302), p_equals(0.0001)
    ('p = 0.030', 'p < 0.001')
    """
    return f"p = {p_value(p)}".replace("= <", "< ")
