"""Descriptions of indexes and warnings in responses."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.index.info import RepresentationInfo, RerankInfo
from pipeline.schema import ITEM
from pipeline.search.candidates import BM25, EXACT, generators
from pipeline.search.fusion import FUSED
from pipeline.search.media import supported_kinds
from pipeline.search.results import Hit
from pipeline.search.scores import VECTOR_SCORES
from pipeline.serve import wire
from pipeline.serve.inputs import federated_rerankers
from pipeline.serve.served import Served, ServedFederation


def truncation_warnings(queries: Sequence[wire.Query], num_truncated: Sequence[int]) -> list[str]:
    """Returns a warning for each kind of text that a reranker truncated.

    EDJE truncates the text of a query or, for an image query, the texts of the hits. Other
    rerankers truncate the texts of the hits.

    >>> truncation_warnings(["a", "b", wire.Media(image="AA")], [0, 4, 0])
    ['the reranker truncated queries by up to 4 tokens']
    """
    warnings = []
    for texts, is_text in (("queries", True), ("texts of hits", False)):
        pairs = zip(queries, num_truncated, strict=True)
        maximum = max((n for q, n in pairs if isinstance(q, str) is is_text), default=0)
        if maximum:
            warnings.append(f"the reranker truncated {texts} by up to {maximum} tokens")
    return warnings


def hit_truncation_warnings(
    queries: Sequence[wire.Query], hits: Sequence[Sequence[Hit]]
) -> list[str]:
    """Returns the warnings of `truncation_warnings` for the hits of each query."""
    records = [[hit.rerank for hit in query_hits if hit.rerank] for query_hits in hits]
    maxima = [max((r.num_truncated_tokens for r in found), default=0) for found in records]
    return truncation_warnings(queries, maxima)


def index_info(served: Served) -> wire.IndexInfo:
    """Returns the description of a served index."""
    index = served.index
    infos = index.representations()
    representations = [_representation(served, info) for info in infos.values()]
    representations += map(_rerank_representation, index.rerank_columns.values())
    return wire.IndexInfo(
        name=served.name,
        version=served.version,
        num_items=len(index),
        default_representation=served.representation(None).name if infos else None,
        representations=representations,
        rerankers=list(served.spec.rerankers),
        columns={f.name: str(f.type) for f in index.schema if f.name in ITEM.names},
    )


def federation_info(served: ServedFederation) -> wire.FederationInfo:
    """Returns the description of a federation."""
    members = []
    for name, member in served.spec.members.items():
        fields = {**dict(member), "name": name, "index": served.members[name].name}
        members.append(wire.MemberInfo(**fields))
    return wire.FederationInfo(
        name=served.name,
        join=served.spec.join,
        members=members,
        rerankers=list(federated_rerankers(served)),
    )


def _representation(served: Served, info: RepresentationInfo) -> wire.Representation:
    default = served.default_candidates(info, "maxsim")
    candidates = list(generators(served.index, info))
    scores = list(VECTOR_SCORES) if info.pooled_column else ["maxsim"]
    stored = ["item"] if info.dim == info.encoder.dim else []
    return wire.Representation(
        name=info.name,
        role="search",
        encoder=info.encoder.name,
        field=info.field,
        compressor=info.compressor["name"],
        num_vectors=info.num_vectors,
        codec=info.codec["name"],
        dim=info.dim,
        scores=[*scores, FUSED] if BM25 in candidates and served.spec.fusion.weights else scores,
        queries=[*supported_kinds(info.encoder.query_kinds), "vectors", *stored],
        candidates=[EXACT, *candidates],
        default_candidates=default.generator,
    )


def _rerank_representation(info: RerankInfo) -> wire.Representation:
    return wire.Representation(
        name=info.name,
        role="rerank",
        encoder=info.encoder,
        compressor=None,
        codec=None,
        dim=info.dim,
        scores=[],
        queries=[],
    )
