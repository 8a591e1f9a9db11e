"""Validation of HTTP requests and their conversion to search options and queries."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from pipeline.config import SpecError, reading, within
from pipeline.data.decode.image import without_comments
from pipeline.encoders import QUERY_KINDS, unsupported_query
from pipeline.index.info import RepresentationInfo
from pipeline.schema import QUERY_FILES, compose
from pipeline.search.candidates import AUTO
from pipeline.search.federation import check_options
from pipeline.search.fusion import FUSED
from pipeline.search.media import Unencoded, is_supported, query_parts, supported_kinds
from pipeline.search.options import VECTORS, Rerank, SearchOptions, representation_info
from pipeline.search.query import Queries, check_texts, query_error
from pipeline.serve import wire
from pipeline.serve.errors import ApiError, from_spec_error
from pipeline.serve.served import Served, ServedFederation
from pipeline.serve.settings import MAX_BATCH_HITS, MAX_IMAGE_PIXELS, MAX_QUERY_CHARS, Limits


def search_options(
    request: wire.SearchFields, served: Served, num_queries: int, limits: Limits
) -> SearchOptions:
    """Returns the options of a request with the defaults of the served index."""
    for name in ("members", "join"):
        if (value := getattr(request, name)) is not None:
            value = list(value) if name == "members" else value
            raise from_spec_error(SpecError(name, value, "null for an index"))
    if request.negative is not None and request.rerank:
        value = wire.query_kind(request.negative)
        raise from_spec_error(SpecError("negative", value, "null with reranking"))
    stages = [_rerank_stage(served, stage) for stage in request.rerank or ()]
    _check_stages(request, stages, num_queries, limits)
    try:
        return _resolve(request, served, tuple(stages) or None)
    except SpecError as error:
        raise from_spec_error(error) from None


def member_options(options: SearchOptions, served: Served) -> SearchOptions:
    """Returns the options of a member of a federation with the defaults of its served index."""
    return _resolve(options, served, None)


def _resolve(
    options: SearchOptions, served: Served, rerank: tuple[Rerank, ...] | None
) -> SearchOptions:
    info = served.representation(options.representation)
    candidates, num_candidates = _candidates(options, served, info)
    changes: dict[str, Any] = {"candidates": candidates, "num_candidates": num_candidates}
    if options.score == FUSED and "fusion" not in options.model_fields_set:
        changes["fusion"] = served.spec.fusion
    return options.resolve(served.index, representation=info.name, rerank=rerank, **changes)


def with_request(
    served: ServedFederation, request: wire.SearchFields, num_queries: int, limits: Limits
) -> tuple[ServedFederation, SearchOptions]:
    """Returns a federation with the options of a request, which must be valid for it.

    The options of the search have the defaults of the rerankers.
    """
    try:
        if request.negative is not None:
            value = wire.query_kind(request.negative)
            raise SpecError("negative", value, "null for a federation")
        check_options(request)
        stages = [_federated_stage(served, stage) for stage in request.rerank or ()]
        _check_stages(request, stages, num_queries, limits)
        request = request.model_copy(update={"rerank": tuple(stages) or None})
        if (maximum := MAX_BATCH_HITS // served.spec.depth) < num_queries:
            rule = f"at most {maximum} queries for a federation of depth {served.spec.depth}"
            raise SpecError("queries", num_queries, rule)
        members, changed = dict(served.spec.members), request.members or {}
        for name, options in changed.items():
            if name not in members:
                raise SpecError.unknown_name("members", name, members)
            given = {field: value for field, value in options if value is not None}
            members[name] = members[name].model_copy(update=given)
        changes: dict[str, Any] = {"members": members, "join": request.join or served.spec.join}
        spec = served.spec.model_copy(update=changes)
        for name in changed:
            with within(f"members.{name}"):
                representation_info(served.members[name].index, members[name].representation)
                _resolve(spec.member_options(name, request), served.members[name], None)
    except SpecError as error:
        raise from_spec_error(error) from None
    return replace(served, spec=spec), request


def federated_rerankers(served: ServedFederation) -> dict[str, Any]:
    """Returns the specs of the rerankers of the indexes of a federation by their names."""
    specs: dict[str, Any] = {}
    for member in served.members.values():
        specs = {**member.spec.rerankers, **specs}
    return specs


def _federated_stage(served: ServedFederation, stage: Rerank) -> Rerank:
    """Returns a stage with the defaults of the first member whose index has the reranker."""
    from pipeline.search.rerankers import OPTIONS

    specs = federated_rerankers(served)
    if stage.name not in specs:
        rule = f"one of {', '.join(specs)}" if specs else "null: no index has a reranker"
        raise SpecError("rerank.name", stage.name, rule)
    spec = specs[stage.name]
    fields = dict.fromkeys(OPTIONS)
    for member in served.members.values():
        other = member.spec.rerankers.get(stage.name, spec)
        if other.model_copy(update=fields) != spec.model_copy(update=fields):
            rule, problem = "the same model in all indexes", f"differs in {member.name}"
            raise SpecError("rerank.name", stage.name, rule, problem)
    return stage.model_copy(update={"top": stage.top or spec.top})


def _candidates(
    options: SearchOptions, served: Served, info: RepresentationInfo
) -> tuple[str, int | None]:
    default = served.default_candidates(info, options.score)
    name = default.generator if options.candidates == AUTO else options.candidates
    number = options.num_candidates
    if number is None and default.generator == name and default.num_candidates:
        number = max(default.num_candidates, options.k)
    return name, number


def _check_stages(
    request: wire.SearchFields, stages: Sequence[Rerank], num_queries: int, limits: Limits
) -> None:
    depth = max((stage.depth for stage in stages), default=0)
    _check_depth(request.k, depth, num_queries, limits)
    for stage in stages:
        if stage.name != VECTORS:
            check_num_pairs(stage.depth, num_queries, limits, "rerank.top")


def _check_depth(k: int, top: int, num_queries: int, limits: Limits) -> None:
    depth = max(k, top)
    field = "k" if k >= depth else "rerank.top"
    maximum = min(limits.max_k, max(MAX_BATCH_HITS // num_queries, 1))
    if depth > maximum:
        message = f"{field} must be at most {maximum}, got {depth}"
        raise ApiError("invalid_argument", message, field)


def check_num_pairs(num_items: int, num_queries: int, limits: Limits, field: str) -> None:
    """Raises `ApiError` if rerankers would have to read too many pairs of a query and an item."""
    maximum = limits.max_rerank_pairs // num_queries
    if num_items > maximum:
        message = f"{field} must select at most {maximum} items to rerank, got {num_items}"
        raise ApiError("invalid_argument", message, field)


def check_num_queries(queries: Sequence[wire.Query], limits: Limits) -> None:
    """Raises `ApiError` if a request contains too many queries or too much text."""
    num_chars = sum(len(text) for text in map(wire.query_text, queries) if text)
    for number, maximum, unit in (
        (len(queries), limits.max_batch_queries, "entries"),
        (num_chars, limits.max_batch_chars, "characters"),
    ):
        if number > maximum:
            message = f"queries must have at most {maximum:,} {unit}, got {number:,}"
            raise ApiError("invalid_argument", message, "queries")


def _rerank_stage(served: Served, stage: Rerank) -> Rerank:
    """Returns a stage with the defaults of the index."""
    if stage.name != VECTORS:
        spec = check_reranker(served, stage.name, "rerank.name")
        return stage.model_copy(update={"top": stage.top or spec.top})
    try:
        name = served.representation(stage.representation).name
    except ApiError as error:
        raise ApiError(error.code, f"rerank.{error.message}", "rerank.representation") from None
    return stage.model_copy(update={"representation": name})


def check_reranker(served: Served, name: str, field: str) -> Any:
    """Returns the spec of a reranker of an index, or raises `ApiError`."""
    rerankers = served.spec.rerankers
    if name not in rerankers:
        error = SpecError.unknown_name(field, name, [VECTORS, *rerankers])
        note = f" (indexes.{served.name}.rerank has the rerankers)"
        raise ApiError("invalid_argument", f"{error}{note}", field)
    return rerankers[name]


def check_readable(queries: Sequence[wire.Query], name: str) -> None:
    """Raises `ApiError` if a query is neither a text nor an image."""
    for position, query in enumerate(queries):
        is_image = isinstance(query, wire.Media) and query.model_fields_set == {"image"}
        if not isinstance(query, str) and not is_image:
            parts = [QUERY_KINDS[part] for part in QUERY_KINDS if part in query.model_fields_set]
            kind, rule = wire.query_kind(query), f"a text or an image for {name}"
            error = query_error(" with ".join(parts) or kind, rule, position, len(queries))
            raise from_spec_error(error)


def read_query(
    query: wire.Query, info: RepresentationInfo
) -> Queries | Unencoded | wire.StoredItem:
    """Converts a query to vectors or to an input of the encoder. Items are returned unchanged."""
    if isinstance(query, wire.Vectors):
        return _read_vectors(query)
    if isinstance(query, wire.StoredItem):
        return query
    unencoded, kinds = read_unencoded(query), info.encoder.query_kinds
    if not is_supported(parts := query_parts(unencoded), kinds):
        raise unsupported_query(parts, supported_kinds(kinds), f"the encoder of {info.name}")
    return unencoded


def _read_vectors(query: wire.Vectors) -> Queries:
    try:
        array = np.asarray(query.vectors, np.float32)
    except (ValueError, OverflowError):
        rule = "a list of vectors of equal length"
        raise SpecError("query", "vectors", rule, "differ in length") from None
    return Queries.from_vectors([array])


def read_unencoded(query: wire.Query) -> Unencoded:
    """Converts the query of a request to an input of the encoder."""
    text = wire.query_text(query)
    if text is not None:
        if len(text) > MAX_QUERY_CHARS:
            rule = f"at most {MAX_QUERY_CHARS:,} characters"
            raise SpecError("query", f"{len(text):,} characters", rule)
        check_texts([text])
    if isinstance(query, str):
        return query
    assert isinstance(query, wire.Media)
    files = {}
    for part in QUERY_FILES:
        if (data := getattr(query, part)) is not None:
            with reading(f"query.{part}", f"the {part}", "a file in base64", ValueError):
                files[part] = base64.b64decode(data, validate=True)
    if "image" in files:
        _check_image(files["image"])
    return compose(text or "", files)


def _check_image(data: bytes) -> None:
    rule = f"a PNG, JPEG or WebP file in base64 of at most {MAX_IMAGE_PIXELS:,} pixels"
    with reading("query.image", "the image", rule, ValueError, Image.DecompressionBombError):
        file = io.BytesIO(without_comments(data))
        with Image.open(file, formats=("PNG", "JPEG", "WEBP")) as image:
            width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise SpecError("query.image", f"{width} x {height} pixels", rule)
