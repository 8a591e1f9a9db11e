"""Checks that all files of a published data set are present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pipeline.config import SpecError

#: Treatment of missing files: an error, or the other files are indexed.
MissingFiles = Literal["error", "skip"]
#: Number of missing files that an error names.
MAX_NAMES = 5


def check_files(field: str, location: str, names: Mapping[str, str], found: Iterable[str]) -> None:
    """Raises `SpecError` if files are missing. The error names the first of them.

    Args:
        field: Spec field of the files.
        location: Its value.
        names: File name by id, of all files that are needed.
        found: Ids of the files that exist.
    """
    missing = sorted(names[item] for item in names.keys() - set(found))
    if missing:
        examples = ", ".join(missing[:MAX_NAMES]) + ", ..." * (len(missing) > MAX_NAMES)
        rule = f"the location of all {len(names):,} files of the data set"
        problem = f"lacks {len(missing):,} of them: {examples}"
        note = "; add them, or set missing: skip"
        raise SpecError(field, location, rule, problem, note)


def check_number(field: str, expected: int | None, found: int, what: str) -> None:
    """Raises `SpecError` if a data set does not have the expected size.

    Args:
        field: Spec field with the expected number.
        expected: Expected number, or None to accept any.
        found: Actual number.
        what: Plural of the counted things.
    """
    if expected is not None and found != expected:
        rule = f"the number of {what} of the data set ({found:,})"
        raise SpecError(field, expected, rule, "differs from it")
