"""Prefixes of representations with nested vectors, which are requested as `NAME@K`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pipeline.config import SpecError
from pipeline.index.info import PREFIX_SEPARATOR, RepresentationInfo
from pipeline.registry import COMPRESSORS


def find_representation(infos: Mapping[str, RepresentationInfo], name: str) -> RepresentationInfo:
    """Returns a stored representation, or for `NAME@K` the first K vectors of a nested one."""
    column, separator, length = name.partition(PREFIX_SEPARATOR)
    if column not in infos:
        raise SpecError.unknown_name("representation", name, infos, "is not in the index")
    info = infos[column]
    if not separator:
        return info
    if not is_nested(info):
        nested = [other for other, candidate in infos.items() if _may_be_nested(candidate)]
        rule = f"a prefix of {' or '.join(nested)}" if nested else "a name without @K"
        raise SpecError("representation", name, rule, "stores no nested vectors")
    budget = info.num_vectors
    is_valid = re.fullmatch("[1-9][0-9]{0,8}", length) and int(length) <= (budget or int(length))
    if not is_valid:
        limits = ">= 1" if budget is None else f"from 1 to {budget}, its stored budget"
        rule = f"{column}{PREFIX_SEPARATOR}K with an integer K {limits}"
        raise SpecError("representation", name, rule)
    return replace(info, max_vectors=int(length))


def is_nested(info: RepresentationInfo) -> bool:
    """Checks whether the first k vectors of each item form a representation with budget k."""
    return COMPRESSORS.build(COMPRESSORS.resolve(info.compressor)).is_nested


def first_vectors(
    vectors_TD: np.ndarray, lengths_B: np.ndarray, max_vectors: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most the first `max_vectors` vectors of each item, and their numbers.

    >>> vectors = np.arange(5).reshape(5, 1)
    >>> [part.tolist() for part in first_vectors(vectors, np.array([3, 0, 2]), 2)]
    [[[0], [1], [3], [4]], [2, 0, 2]]
    """
    if max_vectors is None:
        return vectors_TD, lengths_B
    starts_B = lengths_B.cumsum() - lengths_B
    position_T = np.arange(len(vectors_TD)) - np.repeat(starts_B, lengths_B)
    return vectors_TD[position_T < max_vectors], np.minimum(lengths_B, max_vectors)


def _may_be_nested(info: RepresentationInfo) -> bool:
    with contextlib.suppress(SpecError):
        return is_nested(info)
    return False
