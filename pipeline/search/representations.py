"""The representations of an index that can be searched."""

from __future__ import annotations

from pipeline.config import SpecError
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index


def representation_info(index: Index, name: str | None = None) -> RepresentationInfo:
    """Returns a representation to search; default `full`, else the first.

    Raises:
        SpecError: The representation does not exist, or is only for reranking.
    """
    infos = index.representations()
    if name is None:
        if not infos:
            problem = f"has none in version {index.version}"
            rule = "an index version with at least one representation"
            raise SpecError("index", index.uri, rule, problem)
        return infos["full"] if "full" in infos else next(iter(infos.values()))
    if name in index.rerank_columns:
        raise SpecError(
            "representation", name, f"one of {', '.join(infos)}", "is only for reranking"
        )
    return index.representation(name)
