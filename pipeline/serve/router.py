"""Routing of calls to the replicas of a searcher or reranker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pipeline.index.reader import Edition
from pipeline.search.options import SearchOptions
from pipeline.serve.vectors import SearchVectors

#: Keys of the routing statistics and of the metadata of a replica.
LOADED, SHARD = "loaded", "shard"


class VectorRouter(RequestRouter):
    """Prefers replicas that have loaded the vectors of a search ("warm" replicas).

    Two warm replicas are drawn at random, and Ray takes the one with fewer calls in progress (power
    of two choices). Other replicas are used if no replica is warm, or if both are full. Replicas
    report what they have loaded in their routing statistics, once per second.

    If the replicas of a deployment are different shards, the session id of a call is the number of
    its shard, and only replicas of this shard are considered.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns two warm replicas, and two others that are used if the first are full."""
        if pending_request is None:
            return [_draw_two(candidate_replicas)]
        shard = pending_request.metadata.session_id
        replicas = [
            replica
            for replica in candidate_replicas
            if replica.replica_metadata.get(SHARD, shard) == shard
        ]
        needed = needed_vectors(pending_request.args)
        warm = [r for r in replicas if needed <= r.routing_stats.get(LOADED, set())]
        cold = [r for r in replicas if r not in warm]
        pending_request.routing_context.should_backoff = True  # all replicas have been considered
        return [_draw_two(group) for group in (warm, cold)]

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata=None) -> None:
        """Assigns a replica to its call.

        Ray's method mixes up the calls to several shards: all calls of a request share an id.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return


def needed_vectors(arguments: Sequence[Any]) -> set[tuple[Edition, SearchVectors]]:
    """Returns the vectors and the version of the index that a call to a `Ranker` needs."""
    if len(arguments) < 3 or not isinstance(arguments[0], Edition):
        return set()
    edition, _, options, *_ = arguments
    searches = [options] if isinstance(options, SearchOptions) else options
    return {(edition, SearchVectors.of(search)) for search in searches}


def _draw_two(replicas: list[RunningReplica]) -> list[RunningReplica]:
    return random.sample(replicas, min(2, len(replicas)))
