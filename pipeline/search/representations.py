"""Looks up representations of an index that can be searched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import SpecError

if TYPE_CHECKING:  # imports Lance
    from pipeline.index.info import RepresentationInfo
    from pipeline.index.reader import Index


def representation_info(index: Index, name: str | None = None) -> RepresentationInfo:
    """Returns the metadata of a searchable representation.

    Args:
        name: Name of the representation, or `NAME@K` for a prefix. Defaults to `full` if it exists,
            otherwise the first.
    """
    infos = index.representations()
    if name is None:
        if not infos:
            problem = f"has no representations in version {index.version}"
            rule = "an index with at least one representation"
            raise SpecError("index", index.uri, rule, problem)
        return infos["full"] if "full" in infos else next(iter(infos.values()))
    if name in index.rerank_columns:
        raise SpecError.unknown_name("representation", name, infos, "is only for reranking")
    return index.representation(name)
