"""Choice of replicas by the vectors that they have loaded and by their shard."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from pipeline.index.reader import Edition, IndexReader
from pipeline.search.options import SearchOptions
from pipeline.serve.router import LOADED, SHARD, VectorRouter, needed_vectors
from pipeline.serve.vectors import SearchVectors

OPTIONS = SearchOptions(representation="hpool_2")


def choose(replicas: list[SimpleNamespace], edition: Edition, shard: str) -> list[list[Any]]:
    """Returns the groups of replicas for a search of a shard."""
    metadata, context = SimpleNamespace(session_id=shard), SimpleNamespace(should_backoff=False)
    call = SimpleNamespace(
        args=(edition, None, OPTIONS), metadata=metadata, routing_context=context
    )
    router = cast(VectorRouter, None)  # the choice depends on the arguments only
    groups = asyncio.run(VectorRouter.choose_replicas(router, cast(Any, replicas), cast(Any, call)))
    assert context.should_backoff
    return groups


def test_prefers_replicas_of_the_shard_that_have_loaded_the_vectors(index_uri):
    edition = IndexReader(index_uri).edition
    needed = {(edition, SearchVectors.of(OPTIONS))}
    assert needed_vectors((edition, None, OPTIONS)) == needed
    assert needed_vectors(()) == set()
    more = {(edition, SearchVectors("full", "maxsim", "exact")), *needed}
    older = {(edition._replace(version=edition.version - 1), SearchVectors.of(OPTIONS))}
    cold, warm, whole, old, other = (
        SimpleNamespace(routing_stats=stats, replica_metadata=metadata)
        for stats, metadata in (
            ({}, {SHARD: "0"}),
            ({LOADED: needed}, {SHARD: "0"}),
            ({LOADED: more}, {}),  # of a deployment with one shard
            ({LOADED: older}, {SHARD: "0"}),
            ({LOADED: needed}, {SHARD: "1"}),
        )
    )
    preferred, others = choose([cold, warm, whole, old, other], edition, "0")
    assert all(replica in (warm, whole) for replica in preferred) and len(preferred) == 2
    assert all(replica in (cold, old) for replica in others) and len(others) == 2
    assert choose([cold, other], edition, "1") == [[other], []]
